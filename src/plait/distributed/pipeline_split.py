"""Splitting a model into pipeline stages: where to split, how models of each kind are split, tied weights."""

from __future__ import annotations

import copy
import difflib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed.dtensor import to_local
from plait.distributed.heartbeat import wait_for
from plait.distributed.pipeline_calls import StageCalls, see_calls
from plait.distributed.pipeline_schedule import ScheduleName, placement_of
from plait.distributed.wrap import first_input
from plait.errors import ConfigError, ModelError, Problem
from plait.torch_internals import tree_leaves, tree_map_only

# ---- where to split: so that the largest stage is as small as possible, or at layers that the user names


Bounds = tuple[int, ...]
"""The index of the first layer of each stage, then the number of layers: stage s has layers bounds[s]:bounds[s + 1]."""


def balance(costs: Sequence[float], stages: int) -> Bounds:
    """Return the bounds of stages for which the most expensive stage costs least.

    Of several such splits, the one with the smallest sum of squared stage costs. Every stage gets at least one layer;
    fewer layers than stages raise a `ConfigError`.
    """
    layers = len(costs)
    if layers < stages:
        raise ConfigError(
            Problem(
                "strategy.layout.pp",
                f"{stages} pipeline stages, but the model has only {layers} layers",
                f"Use at most {layers} stages (ranks × stages_per_rank).",
            )
        )
    before = [0.0, *accumulate(costs)]
    # best[n]: (cost of the most expensive stage, sum of squared costs, bounds) of the best split of the first n layers
    # into the number of stages of this iteration; None if there is none.
    best: list[tuple[float, float, Bounds] | None] = [(before[n], before[n] ** 2, (0, n)) for n in range(layers + 1)]
    best[0] = None
    for stage in range(1, stages):
        following: list[tuple[float, float, Bounds] | None] = [None] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for start in range(end - 1, stage - 1, -1):
                previous = best[start]
                cost = before[end] - before[start]
                current = following[end]
                if current is not None and cost > current[0]:
                    break  # a longer stage costs more still
                if previous is None:
                    continue
                candidate = (max(previous[0], cost), previous[1] + cost**2)
                if current is None or candidate < current[:2]:
                    following[end] = (*candidate, (*previous[2], end))
        best = following
    chosen = best[layers]
    assert chosen is not None
    return chosen[2]


def split_at(names: Sequence[str], layers: Sequence[str], stages: int) -> Bounds:
    """Return the bounds of stages that begin at the named layers; `ConfigError` if the names do not fit.

    `names` has the first layer of each stage, in order; that of the first stage may be left out. A name may be the end
    of a layer's full name.
    """
    key = "strategy.pipeline.split"
    problems = []
    indices: list[int] = []
    for name in names:
        matches = [index for index, layer in enumerate(layers) if layer == name or layer.endswith(f".{name}")]
        if len(matches) == 1:
            indices.append(matches[0])
            continue
        close = difflib.get_close_matches(name, layers, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        what = f"several layers are called {name!r}" if matches else f"{name!r} is not a layer of the model"
        problems.append(Problem(key, what, f"{hint}there are: {_list_layers(layers)}"))
    if problems:
        raise ConfigError(problems)
    starts = indices if indices[:1] == [0] else [0, *indices]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(
            Problem(key, f"{list(names)} is not in the order of the layers", f"It is {_list_layers(layers)}.")
        )
    if len(starts) != stages:
        raise ConfigError(
            Problem(
                key,
                f"{list(names)} splits the layers into {len(starts)} stages, but there are {stages}",
                f"Name {stages - 1} layers, the first of each stage but the first stage.",
            )
        )
    return (*starts, len(layers))


def _list_layers(layers: Sequence[str]) -> str:
    return ", ".join(layers) if len(layers) <= 12 else f"{', '.join(layers[:4])}, … {', '.join(layers[-2:])}"


# ---- a model as a list of layers, each of which is built only on the rank that needs it


Layer = Any
"""A module, a `LazyLayer`, or a function of one argument without parameters."""


class LazyLayer:
    """A layer that is not built yet: a factory and its arguments."""

    def __init__(self, factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        self.factory = factory
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """Build the layer and return it."""
        return self.factory(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.factory, '__name__', self.factory)})"


class TiedLazyLayer(LazyLayer):
    """A layer whose module is shared with all other layers of the same `key`, such as a tied embedding and head.

    `forward(module, x)` returns the output of this layer; by default that is `module(x)`. If layers of one key are in
    different stages, each stage has a copy of the module under the same name, and the gradients are summed.
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
    """The layers `first` to `end` of a list, called one after the other.

    The layer at index i of the whole list is the submodule `i`, and a `TiedLazyLayer` is the submodule `tied.<key>`, in
    every stage. So names of parameters do not depend on how the list is split.
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
        """Return the output of the last of these layers for the input `x` of the first."""
        for call in self._calls:
            # Modules are looked up by name: tensor parallelism, LoRA or others may have replaced them since.
            if isinstance(call, str):
                x = self.get_submodule(call)(x)
            elif isinstance(call, tuple):
                name, use = call
                x = use(self.get_submodule(name), x)
            else:
                x = call(x)
        return x


# ---- how models of each kind are split
#
# A `LayerOutline` has the names and costs of a model's layers in order, and makes stages from ranges of them. A stage
# is the same model without the modules that other stages hold, so every parameter keeps its name:
#
# - layers of other stages are deleted from their module list; the remaining entries keep their keys;
# - modules before the first layer (the embedding) are in the first stage only, those after the last layer (final norm,
#   head) in the last stage only.


Call = Callable[[nn.Module, Any, Any], Any]
"""Runs a stage: (module, inputs of the micro-batch, output of the stage before, None for the first) → its output."""


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The range of layers that a stage holds: `first` to `end` (exclusive), of `of` layers."""

    first: int
    end: int
    of: int
    """The number of layers of the whole model."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.end == self.of


class LayerOutline(ABC):
    """A model as a sequence of layers."""

    layers: Sequence[str]
    """Names of the layers, in order."""

    @abstractmethod
    def costs(self) -> list[float]:
        """Return the number of parameters of each layer.

        Modules before the layers are added to the first layer, those after them to the last.
        """

    @abstractmethod
    def full_model(self) -> nn.Module:
        """Return the model as one module."""

    @abstractmethod
    def reduce_to(self, module: nn.Module, span: LayerSpan) -> Call:
        """Remove the modules of other stages from `module`, a copy of `full_model()`; return how to call the rest."""

    @abstractmethod
    def shared(self, spans: Sequence[LayerSpan]) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters that several stages hold: name → the indices of these stages, in order."""

    def make(self, spans: Sequence[LayerSpan]) -> list[tuple[nn.Module, Call]]:
        """Return, for each span, a stage with these layers and the function that runs it.

        The last stage is the model itself, reduced in place. The others are copies of its modules, with its tensors.
        """
        whole = self.full_model()
        tensors = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}
        modules = [*(copy.deepcopy(whole, dict(tensors)) for _ in spans[1:]), whole]
        return [(module, self.reduce_to(module, span)) for module, span in zip(modules, spans, strict=True)]


def outline_of(model: nn.Module | Sequence[Layer], example: Any = None) -> LayerOutline:
    """Return the outline of a model, which splits it into stages; `ModelError` for a model that is not supported.

    Supported are a list of layers, an `nn.Sequential` (also nested), a model of `transformers` (see [Note: stages by
    call order]), and any model whose `forward` has an argument `hidden` (see [Note: a seam in forward]). The first
    layer of a list or an `nn.Sequential` is called with the first of a micro-batch's inputs. `example` is a
    micro-batch; the order of calls of a model with other inputs than tokens is seen with it.
    """
    if isinstance(model, (list, tuple)):
        return _LayerList(model)
    assert isinstance(model, nn.Module)
    if isinstance(model, nn.Sequential):
        return _Sequential(model)
    if "hidden" in inspect.signature(type(model).forward).parameters:
        return _HiddenArgument(model)
    if hasattr(model, "get_input_embeddings") and hasattr(model, "base_model_prefix"):
        return _ByCallOrder(model, example if _has_more_than_tokens(example) else None)
    raise ModelError(
        f"{type(model).__name__} cannot be split into pipeline stages. "
        "Write it as an nn.Sequential or a list of layers, or give its forward an argument `hidden`, from which it "
        "starts where its first layers are not there"
    )


def _has_more_than_tokens(example: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(example))


def as_keywords(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return inputs as keyword arguments of the model's `forward`; positional inputs get its parameters' names."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    return dict(zip(names, values, strict=False))


def count_params(modules: Iterable[nn.Module | None]) -> float:
    """Return the number of elements of all parameters of some modules; None counts as no module."""
    return float(sum(p.numel() for module in modules if module is not None for p in module.parameters()))


def keep_only(container: nn.Module, keys: Iterable[str]) -> None:
    """Delete all entries of a module list except those with these keys."""
    kept = set(keys)
    for key in [key for key in container._modules if key not in kept]:
        del container._modules[key]


class _HiddenArgument(LayerOutline):
    """[Note: a seam in forward]

    The outline of a model of Plait, or of any other that keeps these rules:

    - Its children are, in order: the modules before the layers, one `nn.ModuleList` of layers, the modules after them.
    - `forward` has an argument `hidden`, the output of the stage before: if it is given, the first layer is called with
      it, and the modules before the layers are not used.
    - If its last child is None, `forward` returns the output of the last layer.
    - With `config.tie_embeddings`, the last child (the head) uses the weight of the first (the embedding).
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
        position = children.index(self._list)
        self._before, self._after = children[:position], children[position + 1 :]
        self._tied = bool(getattr(getattr(model, "config", None), "tie_embeddings", False))
        self._keys = list(self._blocks(model)._modules)
        self.layers = [f"{self._list}.{key}" for key in self._keys]

    def _blocks(self, model: nn.Module) -> nn.ModuleList:
        return cast(nn.ModuleList, model._modules[self._list])

    def costs(self) -> list[float]:
        model = self._model
        costs = [count_params([block]) for block in self._blocks(model)]
        costs[0] += count_params(model._modules[name] for name in self._before)
        costs[-1] += count_params(model._modules[name] for name in self._after)
        if self._tied:
            costs[-1] += count_params([model._modules[self._before[0]]])
        return costs

    def full_model(self) -> nn.Module:
        return self._model

    def reduce_to(self, module: nn.Module, span: LayerSpan) -> Call:
        keep_only(self._blocks(module), self._keys[span.first : span.end])
        removed = [] if span.is_first else self._before[1:] if span.is_last and self._tied else self._before
        for name in (*removed, *(() if span.is_last else self._after)):
            module._modules[name] = None

        def call(module: nn.Module, inputs: Any, hidden: Any) -> Any:
            keywords = as_keywords(module, inputs)
            return module(**keywords) if span.is_first else module(**keywords, hidden=hidden)

        return call

    def shared(self, spans: Sequence[LayerSpan]) -> Mapping[str, tuple[int, ...]]:
        if not self._tied or len(spans) == 1:
            return {}
        first = self._before[0]
        embedding = cast(nn.Module, self._model._modules[first])
        return {f"{first}.{name}": (0, len(spans) - 1) for name, _ in embedding.named_parameters()}


class _Sequential(LayerOutline):
    """The outline of an `nn.Sequential`; nested ones are flattened, so that they may be split too."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self.layers = [name for name, _ in _flatten_sequential(model)]

    def costs(self) -> list[float]:
        return [count_params([layer]) for _, layer in _flatten_sequential(self._model)]

    def full_model(self) -> nn.Module:
        return self._model

    def reduce_to(self, module: nn.Module, span: LayerSpan) -> Call:
        removed = set(self.layers) - set(self.layers[span.first : span.end])
        for name in removed:
            parent, _, key = name.rpartition(".")
            del module.get_submodule(parent)._modules[key]
        return _sequential_call(span)

    def shared(self, spans: Sequence[LayerSpan]) -> Mapping[str, tuple[int, ...]]:
        stage_of: dict[int, set[int]] = {}
        names: dict[int, str] = {}
        layers = list(_flatten_sequential(self._model))
        for number, span in enumerate(spans):
            for name, layer in layers[span.first : span.end]:
                for key, parameter in layer.named_parameters():
                    stage_of.setdefault(id(parameter), set()).add(number)
                    names.setdefault(id(parameter), f"{name}.{key}")
        for shared, stages in stage_of.items():
            if len(stages) > 1:
                raise ModelError(
                    f"the parameter {names[shared]!r} is shared by layers of different pipeline stages "
                    f"({', '.join(map(str, sorted(stages)))}); write the model as a list of layers with "
                    "TiedLayerSpec for those that share, or split it so that they stay together"
                )
        return {}


def _flatten_sequential(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for key, child in model._modules.items():  # `named_children` would skip the second use of a layer
        assert child is not None
        if isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward and len(child):
            yield from _flatten_sequential(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child


class _LayerList(LayerOutline):
    """The outline of a list of layers; a stage builds only its own layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        self.layers = [str(index) for index in range(len(layers))]

    def costs(self) -> list[float]:
        with torch.device("meta"):
            return [count_params([self._built(layer)]) for layer in self._layers]

    @staticmethod
    def _built(layer: Layer) -> nn.Module | None:
        if isinstance(layer, LazyLayer):
            return layer.build()
        return layer if isinstance(layer, nn.Module) else None

    def full_model(self) -> nn.Module:
        return LayerStack(self._layers)

    def make(self, spans: Sequence[LayerSpan]) -> list[tuple[nn.Module, Call]]:
        stacks = [LayerStack(self._layers, span.first, span.end) for span in spans]
        return [(stack, self.reduce_to(stack, span)) for stack, span in zip(stacks, spans, strict=True)]

    def reduce_to(self, module: nn.Module, span: LayerSpan) -> Call:
        return _sequential_call(span)

    def shared(self, spans: Sequence[LayerSpan]) -> Mapping[str, tuple[int, ...]]:
        stages: dict[str, list[int]] = {}
        specs: dict[str, TiedLazyLayer] = {}
        for number, span in enumerate(spans):
            for layer in self._layers[span.first : span.end]:
                if isinstance(layer, TiedLazyLayer):
                    specs.setdefault(layer.key, layer)
                    held = stages.setdefault(layer.key, [])
                    if held[-1:] != [number]:
                        held.append(number)
        shared_params = {}
        for key, held in stages.items():
            if len(held) > 1:
                with torch.device("meta"):
                    module = specs[key].build()
                shared_params.update({f"tied.{key}.{name}": tuple(held) for name, _ in module.named_parameters()})
        return shared_params


def _sequential_call(span: LayerSpan) -> Call:
    def call(module: nn.Module, inputs: Any, hidden: Any) -> Any:
        return module(first_input(inputs) if span.is_first else hidden)

    return call


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage on this rank."""

    index: int
    count: int
    """The number of stages of the whole pipeline."""
    module: nn.Module
    """The model, without the modules that other stages hold."""
    call: Call
    """Runs the stage: (module, inputs, output of the stage before) → its output; of the last stage, the model's."""
    tied: Mapping[str, tuple[int, ...]]
    """Parameters that other stages hold too: name → all stages that hold it, in order; the first of them owns it."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which is called with the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which returns the model's output."""
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Return whether a parameter of this stage is counted in a norm, and written to a checkpoint, by this stage.

        False for a tied parameter that an earlier stage holds too, with the same name, values and gradient.
        """
        return name not in self.tied or self.tied[name][0] == self.index


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Which layers each stage has, and on which rank each stage is; equal on every rank."""

    outline: LayerOutline
    bounds: Bounds
    placement: tuple[int, ...]
    """The rank of each stage."""
    tied: Mapping[str, tuple[int, ...]]
    """Parameters that several stages hold: name → these stages, in order."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def layers_of(self, stage: int) -> Sequence[str]:
        """Return the names of the layers of a stage."""
        return self.outline.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def twice_on_a_rank(self) -> list[str]:
        """Return the names of the parameters that two stages of the same rank hold, whichever rank that is."""
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
    example: Any = None,
) -> StagePlan:
    """Return which stage and rank holds which layers; the model is not changed, and no stage is built.

    `ranks` are those of one pipeline; `virtual` is the number of stages per rank, by default the schedule's. `split` is
    "parameters", "time" (with the `costs` from `measure_layers`, equal on all ranks) or the names of the first layers
    of all stages but the first. `example` is a micro-batch, as for `outline_of`.
    """
    placement = placement_of(schedule, ranks, virtual)
    outline = outline_of(model, example)
    if split == "parameters":
        bounds = balance(outline.costs(), len(placement))
    elif split == "time":
        assert costs is not None, "a split by time needs measured costs"
        bounds = balance(costs, len(placement))
    else:
        names = [split] if isinstance(split, str) else split
        bounds = split_at(names, outline.layers, len(placement))
    return StagePlan(outline, bounds, placement, outline.shared(_layer_spans(bounds)))


def make_stages(plan: StagePlan, rank: int, *, one_copy: bool = False) -> list[Stage]:
    """Return the stages of one rank, in order; the model is reduced in place to the last of them.

    Works on the meta device and with values. No tensor is copied, except a parameter that two stages of this rank hold.
    `one_copy` says that the caller will replace these two by one tensor (`tie_stages`), once they have their final
    storage: `Stage.tied` then lists only the first stage of each rank. All ranks must pass the same value.
    """
    mine = [index for index, owner in enumerate(plan.placement) if owner == rank]
    spans = _layer_spans(plan.bounds)
    stages = []
    held: set[int] = set()
    shared = _one_holder_per_rank(plan) if one_copy else plan.tied
    for index, (module, call) in zip(mine, plan.outline.make([spans[index] for index in mine]), strict=True):
        _copy_shared_parameters(module, held)
        tied = {name: holders for name, holders in shared.items() if index in holders}
        stages.append(Stage(index, plan.stages, module, call, tied))
    return stages


def tie_stages(modules: Sequence[nn.Module]) -> None:
    """Replace parameters of the same name in several stages of this rank by one tensor, that of the first stage."""
    held: dict[str, nn.Parameter] = {}
    for module in modules:
        named = dict(module.named_parameters(remove_duplicate=False))
        first = {id(parameter): held[name] for name, parameter in named.items() if name in held}
        _replace_parameters(module, first)
        held.update(module.named_parameters())


def _one_holder_per_rank(plan: StagePlan) -> Mapping[str, tuple[int, ...]]:
    """Return `plan.tied` with only the first holder on each rank, without parameters that only one rank holds."""
    holders_by_name = {}
    for name, holders in plan.tied.items():
        first: dict[int, int] = {}
        for index in holders:
            first.setdefault(plan.placement[index], index)
        if len(first) > 1:
            holders_by_name[name] = tuple(first.values())
    return holders_by_name


def _layer_spans(bounds: Bounds) -> list[LayerSpan]:
    return [LayerSpan(first, end, bounds[-1]) for first, end in pairwise(bounds)]


def _copy_shared_parameters(module: nn.Module, held: set[int]) -> None:
    """Replace parameters whose ids are in `held` (of earlier stages) by copies; add this stage's ids to `held`."""
    copied = {
        id(parameter): nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
        if id(parameter) in held
    }
    _replace_parameters(module, copied)
    held.update(id(parameter) for parameter in module.parameters())


def _replace_parameters(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in all submodules that hold them; `others`: id of the old parameter → new parameter."""
    for submodule in module.modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None and id(parameter) in others:
                submodule._parameters[key] = others[id(parameter)]


# ---- the time of each layer, for `strategy.pipeline.split: time`


PASSES = 3
"""Number of timed forward passes of the model. The first, a warm-up, is ignored; of the others the fastest counts."""


def measure_layers(model: nn.Module | Sequence[Layer], example: Any, *, device: torch.device) -> list[float]:
    """Return the seconds of each layer's forward pass on one micro-batch, `example`.

    The time before the first layer is added to the first, the time after the last layer to the last. A model on the
    meta device stays there: a copy is run whose layers are allocated, with random values, only while they run. So only
    one layer, and the modules outside of all layers, occupy memory at a time.
    """
    outline = outline_of(model, example)
    full = outline.full_model()
    if any(tensor.is_meta for tensor in (*full.parameters(), *full.buffers())):
        full = deepcopy(full)
    call = outline.reduce_to(full, LayerSpan(0, len(outline.layers), len(outline.layers)))
    layers = [_find(full, name.partition("@")[0]) for name in outline.layers]
    inside = {id(submodule) for layer in layers if layer is not None for submodule in layer.modules()}
    for submodule in full.modules():
        if id(submodule) not in inside:
            _allocate(submodule, device, recurse=False)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    times = [_time_layers(full, layers, lambda: call(full, inputs, None), device) for _ in range(PASSES)]
    return [min(column) for column in zip(*times[1:], strict=True)]


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a function, or a layer that is stored under a tied name
        return None


def _time_layers(
    full: nn.Module, layers: Sequence[nn.Module | None], call: Callable[[], Any], device: torch.device
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
    hooks: list[Any] = []
    for layer in dict.fromkeys(layers):  # a layer that is called several times is in the list as often
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
    seconds = [0.0 if layer is None else next(called, 0.0) for layer in layers]
    if marks:
        seconds[0] += marks[0] - start
        seconds[-1] += end - marks[-1]
    return seconds


@torch.no_grad()
def _allocate(module: nn.Module, device: torch.device, *, recurse: bool) -> bool:
    """Allocate a module's meta tensors with random values; return whether there were any."""
    allocated = False
    for submodule in module.modules() if recurse else (module,):
        tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
        for tensors in tables:
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    allocated = True
                    fresh: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    if fresh.is_floating_point():
                        fresh.normal_(0.0, 0.02)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(fresh, requires_grad=False) if is_parameter else fresh
    return allocated


def broadcast_costs(
    costs: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return, on all ranks, the costs that the group's first rank measured, so that all ranks split alike."""
    shared = torch.tensor(list(costs), dtype=torch.float64, device=device)
    dist.broadcast(shared, group=group, group_src=0)
    return [float(cost) for cost in shared.tolist()]


# ---- how any other model is split, without editing its code: by the order of its calls


class _ByCallOrder(LayerOutline):
    """The outline of a model whose calls were seen in one forward pass: [Note: stages by call order]."""

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self._model = model
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ModelError(
                f"{type(model).__name__} with output_router_logits: the balance loss of transformers needs all layers, "
                "of which the last pipeline stage has only its own; set output_router_logits: false"
            )
        self._order = order = see_calls(model, None if example is None else as_keywords(model, example))
        calls = [order.calls[index] for index in order.layers]
        self.layers = [f"{call.module}@{call.turn}" if call.turn else call.module for call in calls]
        called = {call.module for call in order.calls}
        names = [name for name, _ in model.named_modules() if name in order.modules]
        start = names.index(calls[0].module)
        self._unused_before = {name for name in names[:start] if name not in called}
        self._unused_after = {name for name in names[start:] if name not in called}

    def _modules_of(self, span: LayerSpan) -> set[str]:
        """Return the names of the modules that a stage runs."""
        first, last = self._range(span)
        names = {call.module for call in self._order.calls[first : None if last is None else last + 1]}
        return (
            names | (self._unused_before if span.is_first else set()) | (self._unused_after if span.is_last else set())
        )

    def _range(self, span: LayerSpan) -> tuple[int, int | None]:
        """Return the indices of the first and of the last call of a stage; None for the last call of all."""
        first = 0 if span.is_first else self._order.layers[span.first - 1] + 1
        return first, None if span.is_last else self._order.layers[span.end - 1]

    def costs(self) -> list[float]:
        of = len(self.layers)
        spans = [LayerSpan(index, index + 1, of) for index in range(of)]
        return [count_params(self._model.get_submodule(name) for name in self._modules_of(span)) for span in spans]

    def full_model(self) -> nn.Module:
        return self._model

    def reduce_to(self, module: nn.Module, span: LayerSpan) -> Call:
        run = StageCalls(module, self._order, *self._range(span), keeps=self._modules_of(span))
        return lambda module, inputs, received: run(module, as_keywords(module, inputs), received)

    def shared(self, spans: Sequence[LayerSpan]) -> Mapping[str, tuple[int, ...]]:
        for span in spans[:-1]:  # refused on every rank, and before any stage is made
            self._order.crossing(self._order.layers[span.end - 1])
        inside = {id(p) for name in self._order.modules for p in self._model.get_submodule(name).parameters()}
        everywhere = {id(self._model.get_parameter(name)) for name in self._order.direct}
        holders: dict[int, list[int]] = {}
        for stage, span in enumerate(spans):
            modules = [self._model.get_submodule(name) for name in self._modules_of(span)]
            for key in {id(p) for module in modules for p in module.parameters()} | everywhere:
                holders.setdefault(key, []).append(stage)
        every = list(range(len(spans)))
        named = [
            (name, holders.get(id(p), every) if id(p) in inside else every)
            for name, p in self._model.named_parameters()
        ]
        return {name: tuple(stages) for name, stages in named if len(stages) > 1}


# ---- tied weights: parameters that several stages hold, with the same name, values and gradient


TensorOf = Callable[[Stage, str], Tensor]
"""(stage, parameter name) → a tensor of the parameter, such as its gradient."""


class TiedWeights:
    """The parameters that this rank's stages share with stages of other ranks, or with each other.

    All ranks that hold the same shard of such a parameter belong to one pipeline, so `group` is that pipeline's.
    """

    def __init__(self, stages: Sequence[Stage], placement: Sequence[int], group: dist.ProcessGroup) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._placement = placement
        self._group = group
        self._rank = dist.get_rank(group)
        self.holders = {name: holders for stage in stages for name, holders in stage.tied.items()}
        """Parameter name → the stages that hold it, in order; the first owns it."""
        local = {name: [index for index in holders if index in self._stages] for name, holders in self.holders.items()}
        self._copies = [(name, first, copy) for name, (first, *copies) in local.items() for copy in copies]

    def sum(self, find: TensorOf | None = None) -> None:
        """Replace, in place, the tensor of every stage that holds a parameter by the sum over these stages.

        Called by all ranks, once per step. The tensors are those that `find` returns; by default the parameters'
        `.grad`, which is set to zeros where it is None. All ranks add in the order of the stages, so the sums are
        bit-identical, and the weights stay equal.
        """
        for name, holders in sorted(self.holders.items()):
            if not self._trained(name):
                continue
            local = {index: self._local(index, name, find) for index in holders if index in self._stages}
            tensors = self._exchange(local, holders)
            total = torch.stack(tensors).sum(0) if len(tensors) > 2 else tensors[0] + tensors[1]
            for tensor in local.values():
                tensor.copy_(total)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy a weight that two stages of this rank hold from the first stage to the second, and clear its gradient.

        The optimizer and the checkpoint have only the tensor of the first stage; `sum` adds the gradient of the second
        to it. Called before each step and each evaluation.
        """
        for name, first, second in self._copies:
            source, target = (self._stages[index].module.get_parameter(name) for index in (first, second))
            to_local(target).copy_(to_local(source))
            target.grad = None

    def _trained(self, name: str) -> bool:
        stage = next(self._stages[index] for index in self.holders[name] if index in self._stages)
        return stage.module.get_parameter(name).requires_grad

    @torch.no_grad()
    def _local(self, index: int, name: str, find: TensorOf | None) -> Tensor:
        stage = self._stages[index]
        return to_local(_gradient(stage.module.get_parameter(name)) if find is None else find(stage, name))

    @torch.no_grad()
    def _exchange(self, local: dict[int, Tensor], holders: Sequence[int]) -> list[Tensor]:
        """Return the tensors of all stages that hold the parameter, in order; `local` has those of this rank."""
        example = next(iter(local.values()))
        tensors: dict[int, Tensor] = {index: tensor.contiguous() for index, tensor in local.items()}
        peers = sorted({self._placement[index] for index in holders} - {self._rank})
        operations = []
        for index in holders:
            if index in local:
                operations += [self._operation(dist.isend, tensors[index], peer) for peer in peers]
            else:
                tensors[index] = torch.empty_like(example, memory_format=torch.contiguous_format)
                operations.append(self._operation(dist.irecv, tensors[index], self._placement[index]))
        wait_for(
            dist.batch_isend_irecv(operations) if operations else (),
            "an exchange of tied weights between pipeline stages",
        )
        return [tensors[index] for index in holders]

    def _operation(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, group_peer=peer)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
