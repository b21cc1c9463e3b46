"""What gives a model its first values, when it was built without any.

[Note: when a model may be built without values]
On the meta device a constructor runs, but its numbers are lost. So a model may be built there only if something
else makes the same numbers again, module by module: its own `init_weights(module)`, or each module's
`reset_parameters`. Neither is believed on its word. What the constructor wrote into each tensor was recorded, and
so is what the initializer writes. A tensor that it leaves out, a constructor that does more than resets (an
initialisation of its own, weights from a file), a tensor that is no parameter and no buffer: each of them means
that the model is built for real.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Initializer = Callable[[nn.Module], None]
Write = tuple[Any, Any, tuple[Any, ...]]
"""The operation, which part of the storage it wrote to, and its other arguments."""

_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
"""There is nothing to draw on the meta device, and torch would load its compiler: [Note: dynamo is loaded late]."""
_DATA = "data"
"""Stands for a tensor that was an argument of a write: values that nobody can make again."""


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, for each storage, the operations that wrote into it since it was allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, list[Write]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled in here, and to tell the compiler so would load it ([Note: dynamo is loaded late],
        `plait/optim/build.py`)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = args[0] if func in _DRAWS and args[0].is_meta else func(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self._of.pop(_storage(leaf), None)  # newly allocated, perhaps where an old one lay
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor):
                rest = tuple(_DATA if isinstance(a, Tensor) else a for a in args[1:])
                where = (value.storage_offset(), tuple(value.shape))
                self._of.setdefault(_storage(value), []).append((func, where, rest))
        return result

    def of(self, tensor: Tensor) -> list[Write]:
        """What wrote into a tensor, in order."""
        return self._of.get(_storage(tensor), [])

    def forget(self) -> None:
        """Drop what was recorded so far."""
        self._of.clear()


def find_initializer(model: nn.Module, built: Writes | None = None) -> Initializer | None:
    """What sets the values of one module of a model on the meta device, or None where it must be built for real.

    `built` is the record of the model's construction; without it the model's own word has to do.
    See [Note: when a model may be built without values].
    """
    if not all(tensor.is_meta for tensor in _tensors(model)) or _has_loose_tensors(model):
        return None
    declared = _declared(model)
    if declared is None:
        return _reset if _remakes(model, _reset, built, exactly=True) else None

    def reset_and_declared(module: nn.Module) -> None:
        _reset(module)
        declared(module)

    # Many write `init_weights` for the modules they care about, and leave the rest as torch makes them.
    for initializer in (declared, reset_and_declared):
        if _remakes(model, initializer, built, exactly=False):
            return initializer
    return None


def _declared(model: nn.Module) -> Initializer | None:
    declared = getattr(model, "init_weights", None)
    if declared is None:
        return None
    required = [p for p in inspect.signature(declared).parameters.values() if p.default is p.empty]
    takes_a_module = len(required) == 1 or "module" in inspect.signature(declared).parameters
    return declared if takes_a_module else None


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _remakes(model: nn.Module, initializer: Initializer, built: Writes | None, *, exactly: bool) -> bool:
    """Whether an initializer fills every tensor, and loses nothing that the constructor did.

    `exactly`: it must write what the constructor wrote last. Otherwise only what cannot be made again counts.
    """
    seen: set[int] = set()
    with torch.no_grad(), Writes() as writes:
        for module in model.modules():
            own = [tensor for tensor in _direct(module) if id(tensor) not in seen]
            if not own:
                continue
            seen.update(id(tensor) for tensor in own)
            writes.forget()
            try:
                initializer(module)
            except Exception:  # it looks at values, or means something else by its argument
                return False
            for tensor in own:
                made = writes.of(tensor)
                if not made or (built is not None and _loses(built.of(tensor), made, exactly=exactly)):
                    return False
    return True


def _loses(before: list[Write], made: list[Write], *, exactly: bool) -> bool:
    return before[-len(made) :] != made if exactly else any(_DATA in rest for _, _, rest in before)


def _direct(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _has_loose_tensors(model: nn.Module) -> bool:
    """Tensors that are plain attributes: nothing would ever give them values."""
    return any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())


def _storage(tensor: Tensor) -> int:
    """Which storage a tensor has. `data_ptr`, the public number, is 0 for all of them on the meta device."""
    return int(tensor.untyped_storage()._cdata)
