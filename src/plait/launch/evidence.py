"""What is known of a rank besides how it ended. Plain data, which travels from its host to the launcher."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from plait.spec import Beat


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
    """So many processes did the kernel kill for want of memory just when this one ended."""
    recent_oom_kills: int = 0
    """So many in the half minute before; a data worker may have been one of them."""
    oom_of_group: bool = False
    """Those are of its own control group; else of the whole host, and nobody knows who they were."""
    headroom: int | None = None
    """Bytes of host memory that it could still take when it was last seen to run; None: nobody knows."""
    gpu_steps: tuple[int, int, int] | None = None
    """From which step to which the GPU memory between steps grew by how many bytes; None: it did not."""
    host_steps: tuple[int, int, int] | None = None
    """The same of host memory."""
    limit: int | None = None
    """Bytes of host memory that the rank and its neighbours may have together."""

    @property
    def grew_into_the_limit(self) -> bool:
        """Whether it was itself about to take the last of the memory when it was last seen."""
        _, grown = self.growth
        return self.headroom is not None and grown > 0 and self.headroom < max(grown, self.memory // 20)

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
        pairs = {name: tuple(found[name]) for name in ("growth", "gpu_steps", "host_steps") if found[name] is not None}
        return cls(**{**found, "beat": beat, **pairs})
