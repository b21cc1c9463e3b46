"""A model as a list of layers, each of which is built only where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Layer = Any
"""A module, a `LayerSpec`, or a function of one argument without parameters."""


class LayerSpec:
    """A layer that is not built yet: what to call, and with what."""

    def __init__(self, factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        self.factory = factory
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """The layer."""
        return self.factory(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.factory, '__name__', self.factory)})"


class TiedLayerSpec(LayerSpec):
    """A layer whose module is shared with all others of the same `key`.

    `forward(module, x)` says what this use of it computes; without it the module is called. Where uses lie in
    different stages, each has the module under the same name, and their gradients are summed.
    """

    def __init__(
        self,
        key: str,
        factory: Callable[..., nn.Module],
        *args: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(factory, *args, **kwargs)
        self.key = key
        self.forward = forward


class LayerStack(nn.Module):
    """Layers one after another, of which some may be elsewhere.

    Layer number i is the submodule `i`, and a shared one is `tied.<key>`, whichever of them are here: names of
    parameters do not depend on how the list is cut.
    """

    def __init__(self, layers: Sequence[Layer], first: int = 0, end: int | None = None) -> None:
        super().__init__()
        self._calls: list[str | Callable[[Any], Any] | tuple[str, Callable[[nn.Module, Any], Any]]] = []
        shared: dict[str, nn.Module] = {}
        for index, layer in list(enumerate(layers))[first:end]:
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in shared:
                    shared[layer.key] = layer.build()
                name = f"tied.{layer.key}"
                self._calls.append(name if layer.forward is None else (name, layer.forward))
                continue
            built = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(built, nn.Module):
                self.add_module(str(index), built)
            self._calls.append(str(index) if isinstance(built, nn.Module) else built)
        if shared:
            self.tied = nn.ModuleDict(shared)

    def forward(self, x: Any) -> Any:
        """Pass `x` through all layers that are here."""
        for call in self._calls:
            # Modules are looked up by name: a technique may have put another in its place.
            if isinstance(call, str):
                x = self.get_submodule(call)(x)
            elif isinstance(call, tuple):
                name, use = call
                x = use(self.get_submodule(name), x)
            else:
                x = call(x)
        return x
