"""How models of each kind are taken apart.

An outline names the layers of a model in order, says what each costs, and makes the stage that holds some of
them. A stage is the same model with what it does not hold taken out, so every parameter keeps its name:

- layers are deleted from their list, whose other entries keep their keys;
- what comes before the first layer is there in the first stage alone, what comes after the last in the last.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from plait.errors import ModelError
from plait.parallel.pipeline.layers import Layer, LayerSpec, LayerStack, TiedLayerSpec
from plait.spec import first_part

Call = Callable[[nn.Module, Any, Any], Any]
"""Runs a stage: (module, inputs of the micro-batch, what the stage before handed over) → what it hands on."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Which layers a stage holds."""

    first: int
    end: int
    of: int
    """Layers of the whole model."""

    @property
    def starts(self) -> bool:
        """Whether it is the first stage."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether it is the last stage."""
        return self.end == self.of


class Outline(ABC):
    """A model, seen as a row of layers."""

    layers: Sequence[str]
    """Names of the layers, in order."""

    @abstractmethod
    def costs(self) -> list[float]:
        """Parameters of each layer; what lies before and after the layers counts to the first and the last."""

    @abstractmethod
    def whole(self) -> nn.Module:
        """All of it, as one module."""

    @abstractmethod
    def take(self, module: nn.Module, extent: Extent) -> Call:
        """Reduce a copy of `whole()` to some layers, in place; the answer says how to call it."""

    @abstractmethod
    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several stages hold, by name, with the numbers of these stages in order."""

    def make(self, extents: Sequence[Extent]) -> list[tuple[nn.Module, Call]]:
        """The stages with these layers, and how to call them.

        The last is the model itself, reduced. The others are copies of its structure, which hold its own tensors.
        """
        whole = self.whole()
        tensors = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}
        modules = [*(copy.deepcopy(whole, dict(tensors)) for _ in extents[1:]), whole]
        return [(module, self.take(module, extent)) for module, extent in zip(modules, extents, strict=True)]


def outline_of(model: nn.Module | Sequence[Layer]) -> Outline:
    """How a model is taken apart.

    That is known of a list of layers, an `nn.Sequential` (with others inside), a `transformers` causal language
    model, and any model whose `forward` has an argument `hidden` (see [Note: a seam in forward]). The first layer of a
    list or an `nn.Sequential` is called with the first part of the inputs.
    """
    if isinstance(model, (list, tuple)):
        return _Stack(model)
    assert isinstance(model, nn.Module)
    if isinstance(model, nn.Sequential):
        return _Sequential(model)
    if "hidden" in inspect.signature(type(model).forward).parameters:
        return _Seam(model)
    if hasattr(model, "get_input_embeddings") and hasattr(model, "base_model_prefix"):
        from plait.parallel.pipeline.hf import outline_transformers

        return outline_transformers(model)
    raise ModelError(
        f"{type(model).__name__} cannot be split into pipeline stages: nothing says where. "
        "Write it as an nn.Sequential or a list of layers, or give its forward an argument `hidden`, from which it "
        "starts where its first layers are not there"
    )


def as_keywords(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Inputs as keywords of the model's forward."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    return dict(zip(names, values, strict=False))


def parameters_in(modules: Iterable[nn.Module | None]) -> float:
    """How many numbers the parameters of some modules have."""
    return float(sum(p.numel() for module in modules if module is not None for p in module.parameters()))


def keep_only(container: nn.Module, keys: Iterable[str]) -> None:
    """Delete all entries of a module list but these."""
    kept = set(keys)
    for key in [key for key in container._modules if key not in kept]:
        del container._modules[key]


class _Seam(Outline):
    """[Note: a seam in forward]

    A model of ours, or one with the same habits:

    - Its children are: what comes before the layers, one `nn.ModuleList` of layers, what comes after.
    - `forward` has an argument `hidden`: where given, the layers start from it and nothing that comes before
      them is used.
    - Where its last child is None, `forward` returns what the last layer gave.
    - With `config.tie_embeddings`, the last child uses the weight of the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        children = list(model._modules)
        lists = [name for name in children if isinstance(model._modules[name], nn.ModuleList)]
        if len(lists) != 1:
            raise ModelError(
                f"{type(model).__name__} has {len(lists)} lists of layers ({', '.join(lists) or 'none'}); "
                "a pipeline needs one nn.ModuleList that holds all layers"
            )
        self._list = lists[0]
        at = children.index(self._list)
        self._before, self._after = children[:at], children[at + 1 :]
        self._tied = bool(getattr(getattr(model, "config", None), "tie_embeddings", False))
        self._keys = list(self._blocks(model)._modules)
        self.layers = [f"{self._list}.{key}" for key in self._keys]

    def _blocks(self, model: nn.Module) -> nn.ModuleList:
        return cast(nn.ModuleList, model._modules[self._list])

    def costs(self) -> list[float]:
        model = self._model
        costs = [parameters_in([block]) for block in self._blocks(model)]
        costs[0] += parameters_in(model._modules[name] for name in self._before)
        costs[-1] += parameters_in(model._modules[name] for name in self._after)
        if self._tied:
            costs[-1] += parameters_in([model._modules[self._before[0]]])
        return costs

    def whole(self) -> nn.Module:
        return self._model

    def take(self, module: nn.Module, extent: Extent) -> Call:
        keep_only(self._blocks(module), self._keys[extent.first : extent.end])
        gone = [] if extent.starts else self._before[1:] if extent.ends and self._tied else self._before
        for name in (*gone, *(() if extent.ends else self._after)):
            module._modules[name] = None

        def call(module: nn.Module, inputs: Any, handed: Any) -> Any:
            keywords = as_keywords(module, inputs)
            return module(**keywords) if extent.starts else module(**keywords, hidden=handed)

        return call

    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        if not self._tied or len(extents) == 1:
            return {}
        first = self._before[0]
        embedding = cast(nn.Module, self._model._modules[first])
        return {f"{first}.{name}": (0, len(extents) - 1) for name, _ in embedding.named_parameters()}


class _Sequential(Outline):
    """An `nn.Sequential`; those inside it are opened, so a cut may go through them."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self.layers = [name for name, _ in _opened(model)]

    def costs(self) -> list[float]:
        return [parameters_in([layer]) for _, layer in _opened(self._model)]

    def whole(self) -> nn.Module:
        return self._model

    def take(self, module: nn.Module, extent: Extent) -> Call:
        gone = set(self.layers) - set(self.layers[extent.first : extent.end])
        for name in gone:
            parent, _, key = name.rpartition(".")
            del module.get_submodule(parent)._modules[key]
        return _call_in_row(extent)

    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        stage_of: dict[int, set[int]] = {}
        names: dict[int, str] = {}
        layers = list(_opened(self._model))
        for number, extent in enumerate(extents):
            for name, layer in layers[extent.first : extent.end]:
                for key, parameter in layer.named_parameters():
                    stage_of.setdefault(id(parameter), set()).add(number)
                    names.setdefault(id(parameter), f"{name}.{key}")
        for shared, stages in stage_of.items():
            if len(stages) > 1:
                raise ModelError(
                    f"the parameter {names[shared]!r} is shared by layers of different pipeline stages "
                    f"({', '.join(map(str, sorted(stages)))}); write the model as a list of layers with "
                    "TiedLayerSpec for those that share, or cut it so that they stay together"
                )
        return {}


def _opened(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for key, child in model._modules.items():  # `named_children` would leave out a layer that is there twice
        assert child is not None
        if isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward and len(child):
            yield from _opened(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child


class _Stack(Outline):
    """A list of layers; a stage builds only its own."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        self.layers = [str(index) for index in range(len(layers))]

    def costs(self) -> list[float]:
        with torch.device("meta"):
            return [parameters_in([self._built(layer)]) for layer in self._layers]

    @staticmethod
    def _built(layer: Layer) -> nn.Module | None:
        if isinstance(layer, LayerSpec):
            return layer.build()
        return layer if isinstance(layer, nn.Module) else None

    def whole(self) -> nn.Module:
        return LayerStack(self._layers)

    def make(self, extents: Sequence[Extent]) -> list[tuple[nn.Module, Call]]:
        stacks = [LayerStack(self._layers, extent.first, extent.end) for extent in extents]
        return [(stack, self.take(stack, extent)) for stack, extent in zip(stacks, extents, strict=True)]

    def take(self, module: nn.Module, extent: Extent) -> Call:
        return _call_in_row(extent)

    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        stages: dict[str, list[int]] = {}
        specs: dict[str, TiedLayerSpec] = {}
        for number, extent in enumerate(extents):
            for layer in self._layers[extent.first : extent.end]:
                if isinstance(layer, TiedLayerSpec):
                    specs.setdefault(layer.key, layer)
                    held = stages.setdefault(layer.key, [])
                    if held[-1:] != [number]:
                        held.append(number)
        found = {}
        for key, held in stages.items():
            if len(held) > 1:
                with torch.device("meta"):
                    module = specs[key].build()
                found.update({f"tied.{key}.{name}": tuple(held) for name, _ in module.named_parameters()})
        return found


def _call_in_row(extent: Extent) -> Call:
    def call(module: nn.Module, inputs: Any, handed: Any) -> Any:
        return module(first_part(inputs) if extent.starts else handed)

    return call
