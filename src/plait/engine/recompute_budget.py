"""`recompute: auto`, decided before anything has memory, and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from plait.config import RunConfig
from plait.distributed import (
    Activations,
    UnitMemory,
    Way,
    World,
    WrapUnit,
    count_activations,
    find_wrap_units,
    to_local,
)
from plait.engine.preparation import Preparation
from plait.errors import ConfigError, PlaitError, Problem
from plait.monitor import MessageEvent
from plait.optim import is_one_pass, state_bytes
from plait.precision import DTYPES

_SAID: dict[Way, str] = {
    "full": "everything",
    "attention": "everything but attention",
    "cheap": "what lies between products",
}


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What a model keeps for its backward pass before it is spread over ranks.

    [Note: counted while it is whole] Layers that are spread send to each other, and a stage of a pipeline is no model
    that a micro-batch could be given to. So it is counted before, and is the most that a rank will keep: of layers that
    `tp` cuts the inside is less, and only one stage has the logits.
    """

    units: Mapping[str, UnitMemory]
    outside: int
    passing: int

    def of(self, units: Sequence[WrapUnit], ranks: int, times: int) -> Activations:
        """What these of its units keep, of rows that `ranks` share, with so many micro-batches under way."""
        none = UnitMemory()
        accounts = [_scaled(self.units.get(unit.name, none), times / ranks) for unit in units]
        return Activations(accounts, outside=self.outside // ranks, passing=self.passing // ranks)


def _scaled(account: UnitMemory, factor: float) -> UnitMemory:
    sizes = {name: int(getattr(account, name) * factor) for name in ("given", "kept", "products", "attention")}
    return replace(account, **sizes)


def count_whole(given: Preparation, module: nn.Module) -> WholeModel | None:
    """What the model keeps, where `recompute: auto` has to know it before the model is spread; else None."""
    config, layout = given.config, given.world.layout
    if config.strategy.recompute.mode != "auto" or layout.pp * layout.ep * layout.cp * layout.tp == 1:
        return None

    units = find_wrap_units(module, config.strategy.wrap)
    found = measure(module, units, given.example, config, given.world)
    names = [unit.name for unit in units]
    return WholeModel(dict(zip(names, found.units, strict=True)), found.outside, found.passing)


def choose_ways(
    given: Preparation,
    parts: Sequence[nn.Module],
    all_units: Sequence[Sequence[WrapUnit]],
    *,
    late: bool,
    whole: WholeModel | None,
) -> list[list[Way]]:
    """What each unit of each part computes again.

    `late`: gradients exist from their backward pass to the update only.
    """
    config, world = given.config, given.world
    if config.strategy.recompute.mode != "auto":
        return [[] for _ in parts]

    module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    units = [unit for each in all_units for unit in each]
    found = None
    if whole is not None:
        strategy, layout = config.strategy, world.layout
        together = layout.cp * (layout.tp if strategy.tensor.sequence_parallel else 1)
        waits = strategy.pipeline.schedule in ("gpipe", "looped_bfs")  # for all forward passes
        under_way = given.accumulation if waits else min(given.accumulation, layout.pp)
        found = whole.of(units, together, under_way if layout.pp > 1 else 1)
    ways = ways_to_recompute(module, units, given.example, config=config, world=world, late_gradients=late, found=found)
    counts = Counter(ways)
    told = [f"{counts[way]} of {len(ways)} blocks recompute {text}" for way, text in _SAID.items() if counts[way]]
    given.say(MessageEvent(f"recompute: auto: {', '.join(told) or 'everything fits, and nothing is recomputed'}"))
    rest = iter(ways)
    return [[next(rest) for _ in each] for each in all_units]


def gradients_come_late(given: Preparation) -> bool:
    """Whether one process keeps each gradient as its backward pass made it; for steps of one micro-batch."""
    config, world, policy = given.config, given.world, given.policy
    if world.layout.size > 1 or config.train.clip_value is not None:
        return False
    return not (policy.mixed and policy.master) or is_one_pass(config.optim, [torch.empty(1, device=world.device)])


# `recompute: auto`: as little is computed again as the memory asks for; see [Note: the ladder of recomputing].


_HEADROOM = {"cuda": 0.96, "cpu": 0.9}
"""Shares of the memory that are counted on; the rest is for other workspaces and for fragmentation. On CUDA, segments
that grow in place leave little of the latter; see `world.device`. A host has others who want memory too."""
_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS keeps for itself: for the thread that goes forward, and for the one that goes back."""
_AT_WORK = 0.5
"""Gradients inside a unit, on their way through it, take about this share of what the unit keeps."""


class StateBytes(NamedTuple):
    """Bytes of one rank beside activations."""

    steady: float
    """Weights, optimizer state, and gradients where those are there all the time."""
    late: float
    """Bytes of a gradient's number where gradients are made in the backward pass and freed by the update; else 0."""
    outside: int
    """Numbers of trained parameters outside of all units."""


def ways_to_recompute(
    module: nn.Module,
    units: Sequence[WrapUnit],
    example: Any,
    *,
    config: RunConfig,
    world: World,
    late_gradients: bool = False,
    found: Activations | None = None,
) -> list[Way]:
    """What each unit computes again so that the step fits the budget: as little as possible, cheapest first.

    `late_gradients`: they are made by each backward pass anew, in the format that computes. `found`: what the units
    keep, where it was counted before the model was spread over ranks; absent: it is counted here.
    """
    if found is None:
        found = measure(module, units, example, config, world)
    states = states_of(module, found, config, world, late_gradients=late_gradients)
    return choose(found, states, _budget(module, config, world))


def measure(module: nn.Module, units: Sequence[WrapUnit], example: Any, config: RunConfig, world: World) -> Activations:
    """What the units keep of one micro-batch; refused where there is none, or where it cannot be found out."""
    path = "strategy.recompute.mode"
    if example is None:
        message = "'auto' needs one micro-batch to measure, and there is none"
        raise ConfigError(Problem(path, message, "Pass example=… to plait.prepare, or set full, every or selective."))
    try:
        return count_activations(module, units, example, config, world.device)
    except PlaitError:
        raise
    except Exception as error:  # whatever a model may do that tensors without values cannot
        lines = str(error).strip().splitlines() or ["no reason given"]
        message = f"'auto' tries {type(module).__name__} on tensors without values, which failed: {lines[0]}"
        raise ConfigError(Problem(path, message, "Set full, every or selective.")) from error


def choose(found: Activations, states: StateBytes, budget: float) -> list[Way]:
    """What each unit computes again for a step to take at most `budget` bytes."""
    ways: list[Way] = ["none"] * len(found.units)
    for index, way in _moves(found.units):
        if peak_bytes(found, states, ways) <= budget:
            break
        ways[index] = way
    return ways


def _moves(units: Sequence[UnitMemory]) -> Iterator[tuple[int, Way]]:
    """Every step down the ladder, in order. The first units hold their activations longest, so they go first."""
    yield from ((index, "cheap") for index, unit in enumerate(units) if held(unit, "cheap") < unit.kept)
    for index, unit in enumerate(units):
        # Operations for a byte, by cross multiplication: either may have none.
        if unit.attention_flops * unit.products > unit.product_flops * unit.attention > 0:
            yield index, "attention"
    yield from ((index, "full") for index in range(len(units)))


def held(unit: UnitMemory, way: Way) -> int:
    """Bytes that a unit keeps between its forward and its backward pass."""
    return {
        "none": unit.kept,
        "cheap": unit.given + unit.products + unit.attention,
        "attention": unit.given + unit.attention,
        "full": unit.given,
    }[way]


def peak_bytes(found: Activations, states: StateBytes, ways: Sequence[Way]) -> float:
    """The most memory that a step takes: in the forward pass, or where the backward pass meets one of the units."""
    sizes = [held(unit, way) for unit, way in zip(found.units, ways, strict=True)]
    total = states.steady + found.outside + sum(sizes)
    highest = total + found.passing
    for unit, size in reversed(list(zip(found.units, sizes, strict=True))):
        again = max(unit.kept - size, 0)
        highest = max(highest, total + again + _AT_WORK * unit.kept)
        total += unit.numbers * states.late - size
    return max(highest, total + states.outside * states.late)


def states_of(
    module: nn.Module, found: Activations, config: RunConfig, world: World, *, late_gradients: bool
) -> StateBytes:
    """Weights, gradients and optimizer state of one rank, by the table of ZeRO stages."""
    params = [(to_local(param.detach()).numel(), param.requires_grad) for param in module.parameters()]
    numbers, trained = sum(count for count, _ in params), sum(count for count, needed in params if needed)
    strategy, precision = config.strategy, config.precision
    stage, shards = strategy.stage, world.layout.dp_shard
    compute = DTYPES[precision.compute].itemsize
    weight = 4 if precision.master else compute
    here = strategy.offload.share if strategy.offload.on else 1.0
    updated = trained * (weight + state_bytes(config) * weight / 4) * here / (shards if stage >= 1 else 1)
    apart = compute < weight or strategy.offload.on or 1 <= stage < 3
    computing = (numbers if apart else numbers - trained) * compute / (shards if stage == 3 else 1)
    outside = trained - sum(unit.numbers for unit in found.units)
    if late_gradients or strategy.offload.on:  # those of an offloaded optimizer leave as they come
        return StateBytes(updated + computing, compute if late_gradients else 0.0, outside)
    reduce = DTYPES[precision.reduce].itemsize if precision.master else compute
    return StateBytes(updated + computing + trained * reduce / (shards if stage >= 2 else 1), 0.0, outside)


def _budget(module: nn.Module, config: RunConfig, world: World) -> float:
    if config.strategy.recompute.budget_gib is not None:
        return config.strategy.recompute.budget_gib * 2**30
    device = world.device
    if device.type != "cuda":
        return psutil.virtual_memory().available * _HEADROOM["cpu"] / world.ranks.local_size
    free = torch.cuda.mem_get_info(device)[0]
    # What this process has taken already can be used, but for what others than the model hold of it.
    own = sum(param.nbytes for param in module.parameters() if param.device.type == "cuda")
    others = max(torch.cuda.memory_allocated(device) - own, 0)
    return (free + torch.cuda.memory_reserved(device) - others) * _HEADROOM["cuda"] - _WORKSPACES
