"""`recompute: auto`: as little is computed again as the memory asks for; see [Note: the ladder of recomputing]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from plait.config import RunConfig
from plait.errors import ConfigError, PlaitError, Problem
from plait.parallel.activations import Activations, UnitAccount, count_activations
from plait.parallel.offload.space import state_bytes
from plait.parallel.recompute import Way
from plait.parallel.units import Unit
from plait.precision import DTYPES
from plait.world import World, local_part

_HEADROOM = {"cuda": 0.96, "cpu": 0.9}
"""Shares of the memory that are counted on; the rest is for other workspaces and for fragmentation. On CUDA, segments
that grow in place leave little of the latter; see `world.device`. A host has others who want memory too."""
_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS keeps for itself: for the thread that goes forward, and for the one that goes back."""
_AT_WORK = 0.5
"""Gradients inside a unit, on their way through it, take about this share of what the unit keeps."""


class States(NamedTuple):
    """Bytes of one rank beside activations."""

    steady: float
    """Weights, optimizer state, and gradients where those are there all the time."""
    late: float
    """Bytes of a gradient's number where gradients are made in the backward pass and freed by the update; else 0."""
    outside: int
    """Numbers of trained parameters outside of all units."""


def ways_to_recompute(
    module: nn.Module,
    units: Sequence[Unit],
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


def measure(module: nn.Module, units: Sequence[Unit], example: Any, config: RunConfig, world: World) -> Activations:
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


def choose(found: Activations, states: States, budget: float) -> list[Way]:
    """What each unit computes again for a step to take at most `budget` bytes."""
    ways: list[Way] = ["none"] * len(found.units)
    for index, way in _moves(found.units):
        if peak_bytes(found, states, ways) <= budget:
            break
        ways[index] = way
    return ways


def _moves(units: Sequence[UnitAccount]) -> Iterator[tuple[int, Way]]:
    """Every step down the ladder, in order. The first units hold their activations longest, so they go first."""
    yield from ((index, "cheap") for index, unit in enumerate(units) if held(unit, "cheap") < unit.kept)
    for index, unit in enumerate(units):
        # Operations for a byte, by cross multiplication: either may have none.
        if unit.attention_flops * unit.products > unit.product_flops * unit.attention > 0:
            yield index, "attention"
    yield from ((index, "full") for index in range(len(units)))


def held(unit: UnitAccount, way: Way) -> int:
    """Bytes that a unit keeps between its forward and its backward pass."""
    return {
        "none": unit.kept,
        "cheap": unit.given + unit.products + unit.attention,
        "attention": unit.given + unit.attention,
        "full": unit.given,
    }[way]


def peak_bytes(found: Activations, states: States, ways: Sequence[Way]) -> float:
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
) -> States:
    """Weights, gradients and optimizer state of one rank, by the table of ZeRO stages."""
    params = [(local_part(param.detach()).numel(), param.requires_grad) for param in module.parameters()]
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
        return States(updated + computing, compute if late_gradients else 0.0, outside)
    reduce = DTYPES[precision.reduce].itemsize if precision.master else compute
    return States(updated + computing + trained * reduce / (shards if stage >= 2 else 1), 0.0, outside)


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
