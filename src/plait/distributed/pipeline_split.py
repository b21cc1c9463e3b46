"""From a model to the stages of one rank."""

from __future__ import annotations

import copy
import difflib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed.dtensor import is_sharded
from plait.distributed.heartbeat import wait_for
from plait.distributed.pipeline_schedule import ScheduleName, placement_of
from plait.distributed.wrap import first_input
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import compiled_call_set, tree_map_only

# Where to cut: so that the largest stage is as small as can be, or where the user says.


Bounds = tuple[int, ...]
"""The first layer of each stage, and the number of layers."""


def balance(costs: Sequence[float], stages: int) -> Bounds:
    """Cut a row of layers so that the most expensive stage costs least, and the others are as even as can be.

    Every stage gets a layer at least.
    """
    layers = len(costs)
    if layers < stages:
        raise ConfigError(
            Problem(
                "strategy.layout.pp",
                f"{stages} pipeline stages, but the model has {layers} layers to share out",
                f"Use at most {layers} stages (ranks × stages_per_rank).",
            )
        )
    before = [0.0, *accumulate(costs)]
    # best[n]: the cheapest way to cut the first n layers into the stages so far; where two have the same most
    # expensive stage, the one with the smaller sum of squares.
    best: list[tuple[float, float, Bounds] | None] = [(before[n], before[n] ** 2, (0, n)) for n in range(layers + 1)]
    best[0] = None
    for stage in range(1, stages):
        following: list[tuple[float, float, Bounds] | None] = [None] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for start in range(end - 1, stage - 1, -1):
                known = best[start]
                cost = before[end] - before[start]
                found = following[end]
                if found is not None and cost > found[0]:
                    break  # a longer stage costs more still
                if known is None:
                    continue
                offer = (max(known[0], cost), known[1] + cost**2)
                if found is None or offer < found[:2]:
                    following[end] = (*offer, (*known[2], end))
        best = following
    chosen = best[layers]
    assert chosen is not None
    return chosen[2]


def cut_at(names: Sequence[str], layers: Sequence[str], stages: int) -> Bounds:
    """Cut before the named layers, one for each stage but the first; the very first layer may be named too."""
    key = "strategy.pipeline.split"
    problems = []
    found: list[int] = []
    for name in names:
        matches = [index for index, layer in enumerate(layers) if layer == name or layer.endswith(f".{name}")]
        if len(matches) == 1:
            found.append(matches[0])
            continue
        close = difflib.get_close_matches(name, layers, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        what = f"several layers are called {name!r}" if matches else f"{name!r} is no layer of the model"
        problems.append(Problem(key, what, f"{hint}there are: {_listed(layers)}"))
    if problems:
        raise ConfigError(problems)
    starts = found if found[:1] == [0] else [0, *found]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(Problem(key, f"{list(names)} is not in the order of the layers", f"It is {_listed(layers)}."))
    if len(starts) != stages:
        raise ConfigError(
            Problem(
                key,
                f"{list(names)} cuts the layers into {len(starts)} stages, but there are {stages}",
                f"Name {stages - 1} layers, the first of each stage but the first stage.",
            )
        )
    return (*starts, len(layers))


def _listed(layers: Sequence[str]) -> str:
    return ", ".join(layers) if len(layers) <= 12 else f"{', '.join(layers[:4])}, … {', '.join(layers[-2:])}"


# A model as a list of layers, each of which is built only where it is needed.


Layer = Any
"""A module, a `LayerSpec`, or a function of one argument without parameters."""


class LazyLayer:
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


class TiedLazyLayer(LazyLayer):
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
            if isinstance(layer, TiedLazyLayer):
                if layer.key not in shared:
                    shared[layer.key] = layer.build()
                name = f"tied.{layer.key}"
                self._calls.append(name if layer.forward is None else (name, layer.forward))
                continue
            built = layer.build() if isinstance(layer, LazyLayer) else layer
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


# How models of each kind are taken apart.
#
# An outline names the layers of a model in order, says what each costs, and makes the stage that holds some of
# them. A stage is the same model with what it does not hold taken out, so every parameter keeps its name:
#
# - layers are deleted from their list, whose other entries keep their keys;
# - what comes before the first layer is there in the first stage alone, what comes after the last in the last.


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
        if isinstance(layer, LazyLayer):
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
        specs: dict[str, TiedLazyLayer] = {}
        for number, extent in enumerate(extents):
            for layer in self._layers[extent.first : extent.end]:
                if isinstance(layer, TiedLazyLayer):
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
        return module(first_input(inputs) if extent.starts else handed)

    return call


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model that is on this rank."""

    index: int
    count: int
    """Stages of the whole pipeline."""
    module: nn.Module
    """The model, without what other stages hold."""
    call: Call
    """Runs it: (module, inputs, what the stage before handed over) → what goes to the next, or the model's answer."""
    tied: Mapping[str, tuple[int, ...]]
    """Parameters here that other stages hold too, by name, with the stages that do; the first of them owns it."""

    @property
    def is_first(self) -> bool:
        """Whether it takes the inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the model's answer."""
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Whether a parameter of this stage is to be counted (in a norm, in a checkpoint) here.

        False for one that an earlier stage holds too: same name, same values, same gradient.
        """
        return name not in self.tied or self.tied[name][0] == self.index


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Which stage holds which layers, and which rank holds which stage; the same on every rank."""

    outline: Outline
    bounds: Bounds
    placement: tuple[int, ...]
    """The rank of each stage."""
    tied: Mapping[str, tuple[int, ...]]
    """Parameters that several stages hold, by name, with these stages in order."""

    @property
    def stages(self) -> int:
        """How many there are in all."""
        return len(self.placement)

    def layers_of(self, stage: int) -> Sequence[str]:
        """Names of the layers of a stage."""
        return self.outline.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def twice_on_a_rank(self) -> list[str]:
        """Parameters that two stages of one rank hold, whichever rank that is."""
        ranks = {name: [self.placement[stage] for stage in holders] for name, holders in self.tied.items()}
        return [name for name, holding in ranks.items() if len(set(holding)) < len(holding)]


def plan_stages(
    model: nn.Module | Sequence[Layer],
    *,
    ranks: int,
    schedule: ScheduleName,
    virtual: int | None = None,
    split: str | Sequence[str] = "parameters",
    costs: Sequence[float] | None = None,
) -> StagePlan:
    """Decide who holds what; nothing is changed or built.

    `split` is "parameters", "time" (with the `costs` that `measure_layers` found, agreed on by all ranks) or the
    names of the first layers of all stages but the first.
    """
    placement = placement_of(schedule, ranks, virtual)
    outline = outline_of(model)
    if split == "parameters":
        bounds = balance(outline.costs(), len(placement))
    elif split == "time":
        assert costs is not None, "a split by time needs measured costs"
        bounds = balance(costs, len(placement))
    else:
        names = [split] if isinstance(split, str) else split
        bounds = cut_at(names, outline.layers, len(placement))
    return StagePlan(outline, bounds, placement, outline.shared(_extents(bounds)))


def make_stages(plan: StagePlan, rank: int, *, one_copy: bool = False) -> list[Stage]:
    """The stages of one rank, in order; the model is reduced to the last of them, in place.

    Works on the meta device and with values; no tensor is copied, except a shared one that two stages of this
    rank hold. With `one_copy` these two are to become one again (`tie_stages`), once they have their final storage;
    they then count as one holder, the first of them. All ranks must say the same.
    """
    mine = [index for index, owner in enumerate(plan.placement) if owner == rank]
    extents = _extents(plan.bounds)
    stages = []
    held: set[int] = set()
    shared = _one_holder_a_rank(plan) if one_copy else plan.tied
    for index, (module, call) in zip(mine, plan.outline.make([extents[index] for index in mine]), strict=True):
        _own_parameters(module, held)
        tied = {name: holders for name, holders in shared.items() if index in holders}
        stages.append(Stage(index, plan.stages, module, call, tied))
    return stages


def tie_stages(parts: Sequence[nn.Module]) -> None:
    """Have stages of one rank that hold a parameter of the same name hold the first one's tensor."""
    held: dict[str, nn.Parameter] = {}
    for part in parts:
        named = dict(part.named_parameters(remove_duplicate=False))
        first = {id(parameter): held[name] for name, parameter in named.items() if name in held}
        _exchange_parameters(part, first)
        held.update(part.named_parameters())


def _one_holder_a_rank(plan: StagePlan) -> Mapping[str, tuple[int, ...]]:
    """`plan.tied` with the first stage of each rank alone; without what one rank holds alone."""
    found = {}
    for name, holders in plan.tied.items():
        first: dict[int, int] = {}
        for index in holders:
            first.setdefault(plan.placement[index], index)
        if len(first) > 1:
            found[name] = tuple(first.values())
    return found


def _extents(bounds: Bounds) -> list[Extent]:
    return [Extent(first, end, bounds[-1]) for first, end in pairwise(bounds)]


def _own_parameters(module: nn.Module, held: set[int]) -> None:
    """Copy parameters that an earlier stage of this rank has too; a tie inside the stage stays one."""
    copied = {
        id(parameter): nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
        if id(parameter) in held
    }
    _exchange_parameters(module, copied)
    held.update(id(parameter) for parameter in module.parameters())


def _exchange_parameters(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in the place of those with these ids, wherever they are held."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in others:
                part._parameters[key] = others[id(parameter)]


# How long each layer takes, for stages that are balanced by time.


PASSES = 3
"""The first warms up; of the others the fastest counts."""


def measure_layers(model: nn.Module | Sequence[Layer], example: Any, *, device: torch.device) -> list[float]:
    """Seconds of each layer's forward pass on one micro-batch; what lies around the layers counts to the outer ones.

    A model on the meta device stays there: each layer gets memory for as long as it runs, so no more than one
    layer, and what lies outside of all, is there at a time. The values in it are made up.
    """
    outline = outline_of(model)
    whole = outline.whole()
    if any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers())):
        whole = deepcopy(whole)
    call = outline.take(whole, Extent(0, len(outline.layers), len(outline.layers)))
    layers = [_find(whole, name) for name in outline.layers]
    inside = {id(part) for layer in layers if layer is not None for part in layer.modules()}
    for part in whole.modules():
        if id(part) not in inside:
            _allocate(part, device, recurse=False)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    times = [_one_pass(whole, layers, lambda: call(whole, inputs, None), device) for _ in range(PASSES)]
    return [min(column) for column in zip(*times[1:], strict=True)]


def _find(whole: nn.Module, name: str) -> nn.Module | None:
    try:
        return whole.get_submodule(name)
    except AttributeError:  # a function, or a layer that is stored under a shared name
        return None


def _one_pass(
    whole: nn.Module, layers: Sequence[nn.Module | None], call: Callable[[], Any], device: torch.device
) -> list[float]:
    marks: list[float] = []
    gaps = 0.0

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before(layer: nn.Module, _args: Any) -> None:
        nonlocal gaps
        start = now()
        meta = _allocate(layer, device, recurse=True)
        if meta:
            borrowed.append(layer)
        gaps += now() - start
        marks.append(now() - gaps)

    def after(layer: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal gaps
        marks.append(now() - gaps)
        start = now()
        if layer in borrowed:
            borrowed.remove(layer)
            layer.to("meta")
        gaps += now() - start

    borrowed: list[nn.Module] = []
    hooks = []
    for layer in layers:
        if layer is not None:
            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        with torch.no_grad():
            start = now()
            call()
            end = now() - gaps
    finally:
        for hook in hooks:
            hook.remove()
    inner = [later - earlier for earlier, later in zip(marks[::2], marks[1::2], strict=True)]
    called = iter(inner)
    found = [0.0 if layer is None else next(called, 0.0) for layer in layers]
    if marks:
        found[0] += marks[0] - start
        found[-1] += end - marks[-1]
    return found


@torch.no_grad()
def _allocate(module: nn.Module, device: torch.device, *, recurse: bool) -> bool:
    """Give a module's meta tensors memory and some values; whether there were any."""
    found = False
    for part in module.modules() if recurse else (module,):
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in tables:
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    found = True
                    fresh: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    if fresh.is_floating_point():
                        fresh.normal_(0.0, 0.02)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(fresh, requires_grad=False) if is_parameter else fresh
    return found


def broadcast_costs(
    costs: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """The measurements of the group's first rank, for all of it: ranks that measured must not cut differently."""
    shared = torch.tensor(list(costs), dtype=torch.float64, device=device)
    dist.broadcast(shared, group=group, group_src=0)
    return [float(cost) for cost in shared.tolist()]


# How a `transformers` causal language model is taken apart, its code unedited.
#
# A later stage is called with `inputs_embeds`, so that no token is looked up; whatever else its forward does to
# embeddings before the first layer is replaced by something that leaves them as they are. In an earlier stage,
# what comes after the layers is replaced in the same way. Nothing of `transformers` is imported.


_OF_THE_FIRST = ("input_ids", "token_type_ids")
"""Inputs that are looked up in an embedding."""


def outline_transformers(model: nn.Module) -> Outline:
    """The layers of a `transformers` causal language model."""
    return _Transformers(model)


class _Transformers(Outline):
    """See the top of this module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        name = type(model).__name__
        config: Any = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} has an encoder and a decoder; a pipeline takes a causal language model")
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name} with output_router_logits: the balance loss of transformers is made at the end from all "
                "layers, of which a pipeline's last stage has only its own; set output_router_logits: false"
            )
        lists = [(key, found) for key, found in model.named_modules() if isinstance(found, nn.ModuleList)]
        if not lists:
            raise ModelError(f"{name} has no list of layers, so a pipeline cannot share them out")
        self._list, blocks = max(lists, key=lambda entry: len(entry[1]))
        self._holder, _, key = self._list.rpartition(".")
        self._keys = list(blocks._modules)
        self.layers = [f"{self._list}.{block}" for block in self._keys]

        hf: Any = model
        self._embedding = _name_of(model, hf.get_input_embeddings())
        head = hf.get_output_embeddings()
        self._head = None if head is None else _name_of(model, head)
        self._tied = head is not None and getattr(head, "weight", None) is hf.get_input_embeddings().weight
        beside = list(model.get_submodule(self._holder)._modules)
        at = beside.index(key)
        self._before = [self._join(child) for child in beside[:at]]
        self._after = [self._join(child) for child in beside[at + 1 :] if self._has_parameters(child)]
        if not self._after:
            raise ModelError(f"{name} has nothing between its layers and its head, so its stages have no end")
        outside = (child for child in model._modules if child != self._holder.split(".")[0])
        self._outside = [child for child in outside if model._modules[child] is not None]

    def _join(self, child: str) -> str:
        return f"{self._holder}.{child}" if self._holder else child

    def _has_parameters(self, child: str) -> bool:
        return any(True for _ in self._model.get_submodule(self._join(child)).parameters())

    def costs(self) -> list[float]:
        model = self._model
        costs = [parameters_in([model.get_submodule(name)]) for name in self.layers]
        costs[0] += parameters_in(model.get_submodule(name) for name in self._before)
        costs[-1] += parameters_in(model.get_submodule(name) for name in (*self._after, *self._outside))
        return costs

    def whole(self) -> nn.Module:
        return self._model

    def take(self, module: nn.Module, extent: Extent) -> Call:
        keep_only(module.get_submodule(self._list), self._keys[extent.first : extent.end])
        self._cut_layer_types(module, extent)
        if not extent.starts:
            for name in self._before:
                if name == self._embedding:
                    if not (extent.ends and self._tied):
                        _replace(module, name, _Elsewhere(name))
                    continue
                found = module.get_submodule(name)
                if isinstance(found, nn.Embedding):
                    _replace(module, name, _Zero())
                elif isinstance(found, nn.Dropout) or any(True for _ in found.parameters()):
                    _replace(module, name, _Same())
        if extent.ends:
            return _Later(self.layers[extent.first]) if not extent.starts else _last_and_only
        way_out = _WayOut()
        for name in (*self._after, *self._outside):
            _replace(module, name, _Same())
        _replace(module, self._after[0], way_out)
        if self._head is not None:
            _replace(module, self._head, _KeptHead(way_out))
        return _Earlier(way_out) if extent.starts else _Later(self.layers[extent.first], way_out)

    def _cut_layer_types(self, module: nn.Module, extent: Extent) -> None:
        """Some models look the kind of a layer up by its place in the list."""
        holder: Any = module.get_submodule(self._holder)
        kinds = getattr(holder.config, "layer_types", None)
        if kinds is not None and len(set(kinds)) > 1:
            holder.config = copy.copy(holder.config)
            holder.config.layer_types = list(kinds)[extent.first : extent.end]

    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        if not self._tied or len(extents) == 1:
            return {}
        return {f"{self._embedding}.weight": (0, len(extents) - 1)}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, module in model.named_modules() if module is wanted)
    return found


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


class _Elsewhere(nn.Module):
    """Stands for a module of another stage, which nothing should call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._called = name

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ModelError(f"{self._called} is in the first pipeline stage, and was called in another")


class _Zero(nn.Module):
    """Stands for an embedding that was added in the first stage already."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(())


class _Same(nn.Module):
    """Answers with what it is called with."""

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x


class _WayOut(_Same):
    """Keeps what the last layer gave, whatever the model makes of it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        self._kept[:] = [x]
        return x

    def take(self) -> Any:
        """What was kept last, once."""
        return self._kept.pop()


class _KeptHead(nn.Module):
    """Stands for the head: answers with what was kept.

    So that the model returns the very tensor that goes to the next stage, and hooks on what a model returns
    (those of sharded parameters) are hooks on it.
    """

    def __init__(self, way_out: _WayOut) -> None:
        super().__init__()
        self._kept = way_out._kept

    def forward(self, _x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self._kept[0]


def _last_and_only(module: nn.Module, inputs: Any, _handed: Any) -> Any:
    return module(**as_keywords(module, inputs))


class _Earlier:
    """Calls a stage without a head; the labels are for the last."""

    def __init__(self, way_out: _WayOut) -> None:
        self._way_out = way_out

    def __call__(self, module: nn.Module, inputs: Any, _handed: Any) -> Any:
        keywords = _without_cache(as_keywords(module, inputs), module)
        keywords.pop("labels", None)
        module(**keywords)
        return self._way_out.take()


class _Later:
    """Calls a stage that starts from hidden states; makes sure once that they reach its first layer unchanged."""

    def __init__(self, first_layer: str, way_out: _WayOut | None = None) -> None:
        self._first_layer = first_layer
        self._way_out = way_out
        self._checked = False

    def __call__(self, module: nn.Module, inputs: Any, handed: Any) -> Any:
        keywords = _without_cache(as_keywords(module, inputs), module)
        for name in (*_OF_THE_FIRST, *(("labels",) if self._way_out is not None else ())):
            keywords.pop(name, None)
        if self._checked:
            output = module(inputs_embeds=handed, **keywords)
        else:
            with self._watched(module, handed):
                output = module(inputs_embeds=handed, **keywords)
        return output if self._way_out is None else self._way_out.take()

    @contextmanager
    def _watched(self, module: nn.Module, handed: Tensor) -> Iterator[None]:
        """Around the first call, in which the first layer is not run compiled: the compiler has no use for this."""
        layer = module.get_submodule(self._first_layer)

        def look(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arrived = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(arrived, Tensor) or not _equal(arrived.detach(), handed.detach()):
                raise ModelError(
                    f"{type(module).__name__} changes the embeddings that it is given before its first layer "
                    "(it scales them, perhaps), so its stages cannot hand hidden states to each other; "
                    "use tensor parallelism or sharding for it"
                )

        with compiled_call_set(layer, None):
            watch = layer.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
            try:
                yield
            finally:
                watch.remove()
        self._checked = True


@on_fake_tensors(lambda arrived, handed: arrived.shape == handed.shape)
def _equal(arrived: Tensor, handed: Tensor) -> bool:
    return torch.equal(arrived, handed)


def _without_cache(keywords: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    config = cast(Any, module.config)
    return {"use_cache": False, **keywords} if hasattr(config, "use_cache") else keywords


# Weights that several stages hold: one name, one value, one gradient.


TensorOf = Callable[[Stage, str], Tensor]
"""The tensor of a parameter of a stage that is meant: its gradient, say, wherever that is kept."""


class TiedWeights:
    """What this rank's stages share with those of others (or with each other).

    Ranks that hold the same parameter and the same part of it (where it is sharded as well) are those of one
    pipeline, so its own group is enough.
    """

    def __init__(self, stages: Sequence[Stage], placement: Sequence[int], group: dist.ProcessGroup) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._placement = placement
        self._group = group
        self._rank = dist.get_rank(group)
        self.holders = {name: holders for stage in stages for name, holders in stage.tied.items()}
        """Name → stages that hold it, in order; the first owns it."""
        here = {name: [index for index in holders if index in self._stages] for name, holders in self.holders.items()}
        self._copies = [(name, first, copy) for name, (first, *copies) in here.items() for copy in copies]

    def sum(self, find: TensorOf | None = None) -> None:
        """Make every holder's tensor the sum over all holders, in place; to be called by all ranks, once a step.

        Without `find` these are the `.grad` of parameters, zeros where there is none. The sum is taken in the
        order of the stages everywhere, so all holders get the same bits, and go on having the same weights.
        """
        for name, holders in sorted(self.holders.items()):
            if not self._trained(name):
                continue
            own = {index: self._local(index, name, find) for index in holders if index in self._stages}
            parts = self._exchange(own, holders)
            total = torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1]
            for tensor in own.values():
                tensor.copy_(total)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let a second tensor of a weight on this rank follow the first: its values, and no gradient of its own.

        For an optimizer and a checkpoint that know the first alone, whose gradient `sum` makes that of both. To be
        called before a pass.
        """
        for name, first, second in self._copies:
            source, target = (self._stages[index].module.get_parameter(name) for index in (first, second))
            _local(target).copy_(_local(source))
            target.grad = None

    def _trained(self, name: str) -> bool:
        stage = next(self._stages[index] for index in self.holders[name] if index in self._stages)
        return stage.module.get_parameter(name).requires_grad

    def _local(self, index: int, name: str, find: TensorOf | None) -> Tensor:
        stage = self._stages[index]
        return _local(_gradient(stage.module.get_parameter(name)) if find is None else find(stage, name))

    @torch.no_grad()
    def _exchange(self, own: dict[int, Tensor], holders: Sequence[int]) -> list[Tensor]:
        """Everybody's tensors, in the order of the stages."""
        example = next(iter(own.values()))
        parts: dict[int, Tensor] = {index: tensor.contiguous() for index, tensor in own.items()}
        peers = sorted({self._placement[index] for index in holders} - {self._rank})
        operations = []
        for index in holders:
            if index in own:
                operations += [self._operation(dist.isend, parts[index], peer) for peer in peers]
            else:
                parts[index] = torch.empty_like(example, memory_format=torch.contiguous_format)
                operations.append(self._operation(dist.irecv, parts[index], self._placement[index]))
        wait_for(
            dist.batch_isend_irecv(operations) if operations else (),
            "an exchange of tied weights between pipeline stages",
        )
        return [parts[index] for index in holders]

    def _operation(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, group_peer=peer)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()
