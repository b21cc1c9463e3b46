"""From a model to the stages of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from plait.parallel.pipeline.balance import Bounds, balance, cut_at
from plait.parallel.pipeline.layers import Layer
from plait.parallel.pipeline.outline import Call, Extent, Outline, outline_of
from plait.parallel.pipeline.schedule import ScheduleName, placement_of


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
class Plan:
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
) -> Plan:
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
    return Plan(outline, bounds, placement, outline.shared(_extents(bounds)))


def make_stages(plan: Plan, rank: int, *, one_copy: bool = False) -> list[Stage]:
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


def _one_holder_a_rank(plan: Plan) -> Mapping[str, tuple[int, ...]]:
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
