"""All that a profile found, ready to be shown or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.runner.profile.account import TimeAccount
from plait.runner.profile.messages import Log
from plait.runner.profile.modules import ModuleRow


@dataclass(slots=True)
class Memory:
    """Bytes of one rank at the highest moment of a step."""

    parts: dict[str, int]
    """By whose they are, in the step that was counted."""
    counted: int
    """Their sum."""
    measured: int
    """What the allocator of the device had given out at most; on a host, what the process holds."""
    uncompiled: bool
    """Whether the counted step ran without compilation, and the run with it."""


@dataclass(slots=True)
class RankTime:
    """One rank beside the others."""

    rank: int
    ms: float
    kinds: dict[str, float]
    hidden_ms: float
    sent: float
    flops: float


@dataclass(slots=True)
class Report:
    """A profile, as rank 0 tells it: its own step in detail, and the time of every rank."""

    title: str
    device: str
    """The type of the device."""
    device_name: str
    layout: dict[str, int]
    """Sizes of the axes with more than one rank."""
    ranks: list[RankTime]
    first_step: int
    time: TimeAccount
    clock_ms: float
    """A recorded step by the clock of the host."""
    plain_ms: float | None
    """A step before the profiler was on; None where too few came before."""
    modules: list[ModuleRow]
    messages: Log
    memory: Memory
    tokens: int = 0
    """Of one step, over all ranks."""
    formula_flops: float | None = None
    """Of one step, over all ranks, as the model says; None where it does not."""
    peak_flops: float | None = None
    """Of one device, in a second, where it is known."""
    traces: list[str] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """A step as it is without a profiler, where that was measured."""
        return self.plain_ms or self.time.ms

    @property
    def counted_flops(self) -> float:
        """Of one step, over all ranks: all that was computed, what was recomputed too."""
        return sum(rank.flops for rank in self.ranks)

    @property
    def covered(self) -> float:
        """How much of the clock's time the kinds account for; 1.0 where they agree."""
        return sum(use.ms for use in self.time.kinds.values()) / self.clock_ms

    @property
    def mfu(self) -> float | None:
        """The model's arithmetic as a part of what the devices could do in a step."""
        return self._utilization(self.formula_flops)

    @property
    def hfu(self) -> float | None:
        """The same for all that was computed."""
        return self._utilization(self.counted_flops)

    def _utilization(self, flops: float | None) -> float | None:
        if not flops or self.peak_flops is None:
            return None
        return flops / (self.step_ms * 1e-3 * self.peak_flops * len(self.ranks))

    def summary(self) -> str:
        """One line."""
        longest = sorted(self.time.kinds.items(), key=lambda entry: -entry[1].ms)[:3]
        shares = ", ".join(f"{kind} {use.ms / self.time.ms:.0%}" for kind, use in longest)
        return f"{self.time.ms:.4g} ms a step ({self.step_ms:.4g} without the profiler): {shares}"

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, with what follows from it."""
        found = asdict(self)
        for row, told in zip(self.modules, found["modules"], strict=True):
            told["count"] = len(told.pop("names"))
            told["flops_per_s"] = row.flops_per_s
        for log, told in zip(self.messages.rows, found["messages"]["rows"], strict=True):
            told["gbps"] = log.gbps
        found |= {"mfu": self.mfu, "hfu": self.hfu, "counted_flops": self.counted_flops, "covered": self.covered}
        return found


def slowest(ranks: Sequence[RankTime]) -> RankTime | None:
    """The rank that the others wait for: it waits least itself. None where there is only one."""
    if len(ranks) < 2:
        return None
    return min(ranks, key=lambda rank: rank.kinds.get("communication", 0.0))
