"""From what was recorded, counted and read off the clock to a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from plait.config import ProfileConfig
from plait.runner.profile.account import Lanes, TimeAccount
from plait.runner.profile.count import Counted
from plait.runner.profile.marks import named_modules
from plait.runner.profile.messages import message_log
from plait.runner.profile.modules import module_rows
from plait.runner.profile.report import Memory, RankTime, Report
from plait.runner.throughput import peak_flops
from plait.torch_internals import compiled_call

if TYPE_CHECKING:
    from plait.runner.runner import Runner


@dataclass(frozen=True, slots=True)
class Measured:
    """What a profile took down beside its trace; see [Note: the steps of a profile]."""

    config: ProfileConfig
    before: int
    """Steps that the run had made when it began or resumed."""
    counted: Counted
    tokens: int
    """Of one step, on this rank."""
    clock: Mapping[int, float]
    """When steps ended, by their number."""

    def recorded_ms(self) -> float:
        """Milliseconds of a recorded step, by the clock."""
        first, steps = self.config.start - 1, self.config.steps
        return (self.clock[first + steps] - self.clock[first]) * 1e3 / steps

    def plain_ms(self) -> float | None:
        """Milliseconds of a step before the profile began, without the first two; None where there were none."""
        last = self.config.start - 3
        return (self.clock[last] - self.clock[2]) * 1e3 / (last - 2) if last > 2 else None


def rank_time(rank: int, time: TimeAccount, counted: Counted) -> RankTime:
    """What the other ranks are told of this one."""
    return RankTime(
        rank=rank,
        ms=time.ms,
        kinds={kind: use.ms for kind, use in time.kinds.items()},
        hidden_ms=time.hidden_ms,
        sent=sum(message.sent for message in counted.messages),
        flops=float(sum(flops.total for flops in counted.flops.values())),
    )


def assemble(runner: Runner, measured: Measured, lanes: Lanes, time: TimeAccount, ranks: list[RankTime]) -> Report:
    """The report of this rank, with the time of all."""
    world, counted = runner.world, measured.counted
    root = next(name for name, _ in named_modules(runner.engine.model))
    tokens = measured.tokens * world.layout.data_parallel
    return Report(
        title=root,
        device=world.device.type,
        device_name=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        layout={axis: size for axis, size in world.layout.sizes().items() if size > 1},
        ranks=ranks,
        first_step=measured.before + measured.config.start,
        time=time,
        clock_ms=measured.recorded_ms(),
        plain_ms=measured.plain_ms(),
        modules=module_rows(root, time.modules, counted.flops),
        messages=message_log(lanes.trace, counted.messages),
        memory=_memory(runner, counted),
        tokens=tokens,
        formula_flops=_formula_flops(runner, tokens),
        peak_flops=peak_flops(world.device),
        traces=[f"trace-rank{rank.rank}.json" for rank in ranks],
    )


def _formula_flops(runner: Runner, tokens: int) -> float | None:
    """What the model itself says that so many tokens take."""
    sequence = getattr(getattr(runner.loader, "dataset", None), "seq_len", None)
    formula = getattr(runner.engine.model, "flops_per_token", None)
    return float(formula(sequence)) * tokens if formula is not None and sequence is not None and tokens else None


def _memory(runner: Runner, counted: Counted) -> Memory:
    device = runner.world.device
    compiled = any(compiled_call(module) is not None for _, module in named_modules(runner.engine.model))
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return Memory(parts=counted.memory, counted=counted.peak, measured=held, uncompiled=compiled)
