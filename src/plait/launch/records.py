"""Every rank of a launch: where it is, how it is doing, how it ended. Whoever explains a failure reads it here."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.launch.heartbeat import Beat, Phase
from plait.launch.job import Job, RankPlacement

# What is known of a rank besides how it ended. Plain data, which travels from its host to the launcher.


@dataclass(slots=True)
class RankObservation:
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
    def from_json(cls, values: dict[str, Any]) -> RankObservation:
        """What `to_json` wrote."""
        beat = None if values["beat"] is None else Beat.from_json(values["beat"])
        pairs = {
            name: tuple(values[name]) for name in ("growth", "gpu_steps", "host_steps") if values[name] is not None
        }
        return cls(**{**values, "beat": beat, **pairs})


_KEPT_LINES = 60
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a command that was told to stop before its end."""


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
    """It was told to go, because another failed or the user said so: not a cause."""
    lost: bool = False
    """Its host no longer answers, so nobody knows how it ended."""
    log: str | None = None
    """The file on its host that has its output; None where that went to the console."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """The last lines it printed."""
    message: str = ""
    """What it left for the launcher to say."""
    observation: RankObservation = field(default_factory=RankObservation)

    @property
    def running(self) -> bool:
        """Whether it is still to be waited for."""
        return self.exit_code is None and not self.lost

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, by whomever, and then saved and left. Its exit code names the signal."""
        beat = self.observation.beat
        return self.exit_code in STOPPED_CODES and beat is not None and beat.phase is Phase.LEFT

    @property
    def failed(self) -> bool:
        """Whether it ended badly of itself."""
        return self.lost or (bool(self.exit_code) and not self.ended_by_us and not self.stopped)


def new_records(job: Job, placements: Iterable[RankPlacement]) -> list[RankRecord]:
    """Records of ranks that have not started yet."""
    return [RankRecord(placement, log=job.log_file(placement)) for placement in placements]


def record_end(record: RankRecord, code: int, *, by_us: bool) -> None:
    """Write down that a rank has ended; `by_us`: it was told to."""
    record.exit_code, record.ended, record.ended_by_us = code, time.time(), by_us


def causes(records: Sequence[RankRecord]) -> list[RankRecord]:
    """The ranks that failed of themselves, the first one first. The others are victims."""
    return sorted((record for record in records if record.failed), key=lambda record: record.ended or 0.0)


def exit_code(records: Sequence[RankRecord], *, hung: bool = False) -> int:
    """That of the worst rank, as a shell has it: 128 and the signal where there was one.

    Ranks that `hung` say nothing with theirs: how they were ended is the launcher's doing.
    """
    if hung:
        return 1
    failed = causes(records)
    if not failed:
        # Told to go, and gone before the end: still no success, whoever said so.
        stopped = [record for record in records if record.stopped] or records
        return max((_shell(record.exit_code or 0) for record in stopped), default=0)
    signals = [record.exit_code for record in failed if (record.exit_code or 0) < 0]
    if signals:
        return max(_shell(code or 0) for code in signals)
    return max(255 if record.lost else _shell(record.exit_code or 0) for record in failed)


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; a number that has no name stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# How one attempt at a job went.


SAVE_AND_EXIT_S = 60.0
"""How long ranks may take to save and leave when they are to start again with others."""


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """All ranks are gone, one way or another."""

    code: int
    """The exit code for a shell."""
    records: Sequence[RankRecord]
    hung: bool = False
    interrupted: bool = False
    """The user ended it."""
    reform: bool = False
    """The ranks were asked to leave because others can join them now."""


def never() -> bool:
    """Nobody wants to join."""
    return False


# How long ranks are waited for once something has gone wrong.


FAILURE_WAIT_S = 2.0
"""The other ranks may go on so long once one has failed: they may have something to say about it."""
GRACE_S = 10.0
"""They may take so long to leave after SIGTERM. A step cannot be finished without the one that is gone."""
HANG_GRACE_S = 2.0
"""The same where the run hangs: nobody listens who waits in a collective."""
STACK_WAIT_S = 0.5
"""Ranks may take so long to write down their stacks."""
