"""`recompute: auto`: choose what each FSDP wrap unit recomputes so that a step fits into the device's memory.

The choice is made before parameters are allocated. A wrapped module, or unit, is a submodule that is sharded, compiled
and recomputed as one, usually a block. *Products* are the matrix multiplications outside of attention.
"""

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
    RecomputeLevel,
    UnitMemory,
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

_LEVEL_TEXTS: dict[RecomputeLevel, str] = {
    "full": "everything",
    "attention": "everything but attention",
    "cheap": "what lies between products",
}


@dataclass(frozen=True, slots=True)
class FullModelActivations:
    """The activations that the full model keeps for its backward pass, counted before it is distributed over ranks.

    [Note: counted while it is whole] Activations are counted by running a micro-batch on fake tensors. That does not
    work after the model is distributed: its layers communicate, and a pipeline stage cannot run a micro-batch alone. So
    the full model is counted first, which gives an upper bound for a rank: tensor parallelism also shards activations
    inside of layers, and only one stage has the logits.
    """

    units: Mapping[str, UnitMemory]
    """What each wrapped module keeps, by name."""
    outside: int
    """Bytes kept outside of all wrapped modules."""
    transient: int
    """The peak bytes of the forward pass minus those that are still allocated at its end."""

    def of(self, units: Sequence[WrapUnit], ranks: int, times: int) -> Activations:
        """Return the activations of these wrapped modules on one rank.

        `ranks` split the tokens of a micro-batch between them; `times` micro-batches are in flight at the same time.
        """
        empty = UnitMemory()
        units_memory = [_scaled(self.units.get(unit.name, empty), times / ranks) for unit in units]
        return Activations(units_memory, outside=self.outside // ranks, transient=self.transient // ranks)


def _scaled(memory: UnitMemory, factor: float) -> UnitMemory:
    sizes = {name: int(getattr(memory, name) * factor) for name in ("inputs", "saved", "products", "attention")}
    return replace(memory, **sizes)


def count_full_model(given: Preparation, module: nn.Module) -> FullModelActivations | None:
    """Return the activations of the full model, if `recompute: auto` needs them before it is distributed; else None."""
    config, layout = given.config, given.world.layout
    if config.strategy.recompute.mode != "auto" or layout.pp * layout.ep * layout.cp * layout.tp == 1:
        return None

    units = find_wrap_units(module, config.strategy.wrap)
    activations = measure(module, units, given.example, config, given.world)
    names = [unit.name for unit in units]
    return FullModelActivations(
        dict(zip(names, activations.units, strict=True)), activations.outside, activations.transient
    )


def choose_recompute_levels(
    given: Preparation,
    stage_modules: Sequence[nn.Module],
    all_units: Sequence[Sequence[WrapUnit]],
    *,
    late_gradients: bool,
    full_model: FullModelActivations | None,
) -> list[list[RecomputeLevel]]:
    """Return for each stage the level of each wrapped module, and log a summary; empty lists unless `recompute: auto`.

    `late_gradients`: gradients are not kept in memory between steps, but allocated by each backward pass.
    """
    config, world = given.config, given.world
    if config.strategy.recompute.mode != "auto":
        return [[] for _ in stage_modules]

    module = stage_modules[0] if len(stage_modules) == 1 else nn.ModuleList(stage_modules)
    units = [unit for stage_units in all_units for unit in stage_units]
    activations = None
    if full_model is not None:
        strategy, layout = config.strategy, world.layout
        together = layout.cp * (layout.tp if strategy.tensor.sequence_parallel else 1)
        waits = strategy.pipeline.schedule in ("gpipe", "looped_bfs")  # for all forward passes
        under_way = given.accumulation if waits else min(given.accumulation, layout.pp)
        activations = full_model.of(units, together, under_way if layout.pp > 1 else 1)
    levels = recompute_levels(
        module, units, given.example, config=config, world=world, late_gradients=late_gradients, activations=activations
    )
    counts = Counter(levels)
    texts = [
        f"{counts[level]} of {len(levels)} blocks recompute {text}"
        for level, text in _LEVEL_TEXTS.items()
        if counts[level]
    ]
    given.log(MessageEvent(f"recompute: auto: {', '.join(texts) or 'everything fits, and nothing is recomputed'}"))
    rest = iter(levels)
    return [[next(rest) for _ in stage_units] for stage_units in all_units]


def gradients_are_transient(given: Preparation) -> bool:
    """Whether each backward pass allocates the gradients anew, for one process and steps of one micro-batch."""
    config, world, policy = given.config, given.world, given.policy
    if world.layout.size > 1 or config.train.clip_value is not None:
        return False
    return not (policy.mixed and policy.master) or is_one_pass(config.optim, [torch.empty(1, device=world.device)])


# The choice itself: as little recomputation as the memory allows; see [Note: the ladder of recomputing].


_HEADROOM = {"cuda": 0.96, "cpu": 0.9}
"""The fraction of the free memory that is used; the rest is for other workspaces and for fragmentation. On CUDA,
expandable segments leave little fragmentation; see `distributed.device`. On a host, other processes need memory too."""
_WORKSPACES = 2 * 32 * 2**20
"""Workspaces of cuBLAS: one for the thread of the forward pass, one for that of the backward pass."""
_AT_WORK = 0.5
"""Intermediate gradients inside a wrapped module take about this fraction of the bytes of its activations."""


class StateBytes(NamedTuple):
    """The memory of one rank besides activations."""

    steady: float
    """Bytes of weights, optimizer state, and of gradients if they stay allocated between steps."""
    gradient: float
    """Bytes per element of gradients, if each backward pass allocates them; 0 if they stay allocated."""
    outside: int
    """The number of elements of trained parameters outside of all wrapped modules."""


def recompute_levels(
    module: nn.Module,
    units: Sequence[WrapUnit],
    example: Any,
    *,
    config: RunConfig,
    world: World,
    late_gradients: bool = False,
    activations: Activations | None = None,
) -> list[RecomputeLevel]:
    """Return the level of each wrapped module with which a step fits into the budget, with the least recompute.

    `late_gradients`: each backward pass allocates gradients anew, in the compute dtype. `activations`: counted before
    the model was distributed over ranks; None: they are counted here.
    """
    if activations is None:
        activations = measure(module, units, example, config, world)
    states = states_of(module, activations, config, world, late_gradients=late_gradients)
    return choose(activations, states, _budget(module, config, world))


def measure(module: nn.Module, units: Sequence[WrapUnit], example: Any, config: RunConfig, world: World) -> Activations:
    """Return the activations of one micro-batch, counted on fake tensors.

    Raises `ConfigError` without a micro-batch, or if the model fails on fake tensors.
    """
    path = "strategy.recompute.mode"
    if example is None:
        message = "'auto' needs one micro-batch to measure, and none is given"
        raise ConfigError(Problem(path, message, "Pass example=… to plait.prepare, or set full, every or selective."))
    try:
        return count_activations(module, units, example, config, world.device)
    except PlaitError:
        raise
    except Exception as error:  # the model's own code may do anything that fake tensors do not support
        lines = str(error).strip().splitlines() or ["no reason given"]
        message = f"'auto' runs {type(module).__name__} on fake tensors, which failed: {lines[0]}"
        raise ConfigError(Problem(path, message, "Set full, every or selective.")) from error


def choose(activations: Activations, states: StateBytes, budget: float) -> list[RecomputeLevel]:
    """Return the level of each wrapped module with which a step takes at most `budget` bytes.

    If none does: `full` for all.
    """
    levels: list[RecomputeLevel] = ["none"] * len(activations.units)
    for index, level in _reductions(activations.units):
        if peak_bytes(activations, states, levels) <= budget:
            break
        levels[index] = level
    return levels


def _reductions(units: Sequence[UnitMemory]) -> Iterator[tuple[int, RecomputeLevel]]:
    """Yield (module index, level) in the order in which levels are raised: the cheapest recompute per byte first.

    At each level the first modules come first, since their activations are kept longest.
    """
    yield from ((index, "cheap") for index, unit in enumerate(units) if kept_bytes(unit, "cheap") < unit.saved)
    for index, unit in enumerate(units):
        # If recomputing attention takes more FLOPs per byte than recomputing products, recompute only the products
        # first. Ratios are compared by cross multiplication, since either number of bytes may be zero.
        if unit.attention_flops * unit.products > unit.product_flops * unit.attention > 0:
            yield index, "attention"
    yield from ((index, "full") for index in range(len(units)))


def kept_bytes(unit: UnitMemory, level: RecomputeLevel) -> int:
    """Return the bytes that a wrapped module with this level keeps between its forward and its backward pass."""
    return {
        "none": unit.saved,
        "cheap": unit.inputs + unit.products + unit.attention,
        "attention": unit.inputs + unit.attention,
        "full": unit.inputs,
    }[level]


def peak_bytes(activations: Activations, states: StateBytes, levels: Sequence[RecomputeLevel]) -> float:
    """Return the peak bytes of a step, which are reached at the end of the forward pass, or in a module's backward."""
    sizes = [kept_bytes(unit, level) for unit, level in zip(activations.units, levels, strict=True)]
    total = states.steady + activations.outside + sum(sizes)
    highest = total + activations.transient
    for unit, size in reversed(list(zip(activations.units, sizes, strict=True))):
        again = max(unit.saved - size, 0)
        highest = max(highest, total + again + _AT_WORK * unit.saved)
        total += unit.trained_params * states.gradient - size
    return max(highest, total + states.outside * states.gradient)


def states_of(
    module: nn.Module, activations: Activations, config: RunConfig, world: World, *, late_gradients: bool
) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer state of one rank, by ZeRO stage."""
    params = [(to_local(param.detach()).numel(), param.requires_grad) for param in module.parameters()]
    numbers, trained = sum(count for count, _ in params), sum(count for count, needed in params if needed)
    strategy, precision = config.strategy, config.precision
    stage, shards = strategy.stage, world.layout.dp_shard
    compute = DTYPES[precision.compute].itemsize
    weight = 4 if precision.master else compute
    device_share = strategy.offload.share if strategy.offload.on else 1.0
    updated = trained * (weight + state_bytes(config) * weight / 4) * device_share / (shards if stage >= 1 else 1)
    separate_compute = compute < weight or strategy.offload.on or 1 <= stage < 3
    computing = (numbers if separate_compute else numbers - trained) * compute / (shards if stage == 3 else 1)
    outside = trained - sum(unit.trained_params for unit in activations.units)
    if late_gradients or strategy.offload.on:  # those of an offloaded optimizer are copied away as they are computed
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
    # Memory that this process has reserved can be used, except for tensors other than the model's parameters.
    model_bytes = sum(param.nbytes for param in module.parameters() if param.device.type == "cuda")
    others = max(torch.cuda.memory_allocated(device) - model_bytes, 0)
    return (free + torch.cuda.memory_reserved(device) - others) * _HEADROOM["cuda"] - _WORKSPACES
