"""The record of every rank of a launch: its placement, what was observed of it, and how it ended."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.launch.heartbeat import Beat, Phase
from plait.launch.job import Job, RankPlacement


@dataclass(slots=True)
class RankObservation:
    """What was observed of a rank on its host, while it ran and once more at its end. Sent to the launcher."""

    beat: Beat | None = None
    """The last heartbeat; None for a script that does not use Plait."""
    at: float = 0.0
    """When it was read, by the clock of the rank's host."""
    state: str = ""
    """The kernel's process state when it last ran: `T` stopped by a signal, `D` waiting in the kernel."""
    stacks: str = ""
    """The stacks of all its threads, if they were requested or it crashed."""
    memory: int = 0
    """Bytes of host memory when it last ran."""
    memory_peak: int = 0
    growth: tuple[float, int] = (0.0, 0)
    """Over how many seconds before that its memory grew by how many bytes."""
    oom_kills: int = 0
    """Processes that the kernel's OOM killer ended at the time when this one ended."""
    recent_oom_kills: int = 0
    """The same in the half minute before; a data worker may have been one of them."""
    oom_of_group: bool = False
    """Whether those counts are of its own control group; else of the whole host, and which processes is unknown."""
    headroom: int | None = None
    """Bytes of host memory that were still available when it last ran; None: not known."""
    gpu_steps: tuple[int, int, int] | None = None
    """From which step to which the GPU memory left by each step grew, and by how many bytes; None: it did not grow."""
    host_steps: tuple[int, int, int] | None = None
    """The same of host memory."""
    limit: int | None = None
    """The memory limit of its control group in bytes."""

    @property
    def grew_into_the_limit(self) -> bool:
        """Whether its own growth was about to use up the memory when it last ran."""
        _, grown = self.growth
        return self.headroom is not None and grown > 0 and self.headroom < max(grown, self.memory // 20)

    @property
    def waiting_s(self) -> float:
        """Seconds that it has been waiting in a collective; 0 where it does not wait."""
        return max(self.at - self.beat.called, 0.0) if self.beat is not None and self.beat.pending else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankObservation:
        """What `to_json` wrote."""
        beat = None if values["beat"] is None else Beat.from_json(values["beat"])
        pairs = {
            name: tuple(values[name]) for name in ("growth", "gpu_steps", "host_steps") if values[name] is not None
        }
        return cls(**{**values, "beat": beat, **pairs})


_KEPT_LINES = 60
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a command that a signal stopped before its end."""


@dataclass(slots=True)
class RankRecord:
    """One rank, from before its start to after its end."""

    placement: RankPlacement
    pid: int | None = None
    """On its own host; None before it has started."""
    started: float | None = None
    """Seconds since the epoch, by the launcher's clock, as are the others."""
    exit_code: int | None = None
    """None while it runs; negative: the signal that ended it."""
    ended: float | None = None
    ended_by_us: bool = False
    """The launcher ended it, because another rank failed or the user asked to stop: not a cause."""
    lost: bool = False
    """Its host no longer answers, so how it ended is not known."""
    log: str | None = None
    """The file on its host that has its output; None where that went to the console."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """The last lines it printed."""
    message: str = ""
    """The error message that it left for the launcher to print."""
    observation: RankObservation = field(default_factory=RankObservation)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None and not self.lost

    @property
    def stopped(self) -> bool:
        """Whether a signal asked it to stop, and it saved and exited. Its exit code names the signal."""
        beat = self.observation.beat
        return self.exit_code in STOPPED_CODES and beat is not None and beat.phase is Phase.LEFT

    @property
    def failed(self) -> bool:
        """Whether it failed, other than by being ended by the launcher."""
        return self.lost or (bool(self.exit_code) and not self.ended_by_us and not self.stopped)


def new_records(job: Job, placements: Iterable[RankPlacement]) -> list[RankRecord]:
    """Records of ranks that have not started yet."""
    return [RankRecord(placement, log=job.log_file(placement)) for placement in placements]


def record_end(record: RankRecord, code: int, *, by_us: bool) -> None:
    """Record the end of a rank; `by_us`: the launcher ended it."""
    record.exit_code, record.ended, record.ended_by_us = code, time.time(), by_us


def causes(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the ranks that failed, the first one first; not those that the launcher ended because of them."""
    return sorted((record for record in records if record.failed), key=lambda record: record.ended or 0.0)


def exit_code(records: Sequence[RankRecord], *, hung: bool = False) -> int:
    """Return the exit code of the worst rank, as a shell reports it: 128 plus the signal where there was one.

    It is 1 for ranks that `hung`, which the launcher has ended.
    """
    if hung:
        return 1
    failed = causes(records)
    if not failed:
        # Asked to stop, and stopped before the end: not a success.
        stopped = [record for record in records if record.stopped] or records
        return max((_shell(record.exit_code or 0) for record in stopped), default=0)
    signals = [record.exit_code for record in failed if (record.exit_code or 0) < 0]
    if signals:
        return max(_shell(code or 0) for code in signals)
    return max(255 if record.lost else _shell(record.exit_code or 0) for record in failed)


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code


def signal_name(number: int) -> str:
    """Return the name of a signal, `SIGKILL` for 9; a number without a name stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


SAVE_AND_EXIT_S = 60.0
"""How long ranks may take to save and exit when they are to start again together with others."""


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How one attempt at a job ended."""

    code: int
    """The exit code for a shell."""
    records: Sequence[RankRecord]
    hung: bool = False
    interrupted: bool = False
    """The user ended it."""
    reform: bool = False
    """The ranks were asked to exit because others can join them now."""


# How long ranks are waited for once something has gone wrong.


FAILURE_WAIT_S = 2.0
"""How long the other ranks keep running once one has failed: they may report an error of their own."""
GRACE_S = 10.0
"""How long they may take to exit after SIGTERM. They cannot finish a step without the rank that failed."""
HANG_GRACE_S = 2.0
"""The same where the run hangs: a rank that waits in a collective does not handle signals."""
STACK_WAIT_S = 0.5
"""How long ranks may take to write their stacks."""
