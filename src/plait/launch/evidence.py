"""What is known of a rank besides how it ended. Plain data, which travels from its host to the launcher."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from plait.spec.beat import Beat


@dataclass(slots=True)
class Evidence:
    """Gathered on the rank's host, while it runs and once more when it has ended."""

    beat: Beat | None = None
    """The last heartbeat; None for a script that does not use Plait."""
    at: float = 0.0
    """When it was read, by the clock of the rank's host."""
    state: str = ""
    """As the kernel has it: `T` stopped by a signal, `D` waiting inside of the kernel. When it was last seen to run."""
    stacks: str = ""
    """Of all its threads, if they were asked for or it crashed."""
    memory: int = 0
    """Bytes of host memory when it was last seen."""
    memory_peak: int = 0
    growth: tuple[float, int] = (0.0, 0)
    """Over how many seconds before that it grew by how many bytes."""
    oom_kills: int = 0
    """So many processes did the kernel kill for want of memory during the run, where this one ran."""
    limit: int | None = None
    """Bytes of host memory that the rank and its neighbours may have together."""

    @property
    def waiting_s(self) -> float:
        """How long it has been waiting in a collective; 0 where it is not."""
        return max(self.at - self.beat.called, 0.0) if self.beat is not None and self.beat.pending else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Evidence:
        """What `to_json` wrote."""
        beat = None if found["beat"] is None else Beat.from_json(found["beat"])
        return cls(**{**found, "beat": beat, "growth": tuple(found["growth"])})
