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
    """The last observation of a rank on its host. Made while it runs and at its end, and sent to the launcher."""

    beat: Beat | None = None
    """The last heartbeat; None for a script that does not use Plait."""
    at: float = 0.0
    """The time when the heartbeat was read, by the clock of the rank's host."""
    state: str = ""
    """The kernel's process state at the last sample: `T` stopped by a signal, `D` waiting in the kernel."""
    stacks: str = ""
    """The stacks of all its threads, if they were requested or it crashed."""
    memory: int = 0
    """Bytes of host memory that it used at the last sample."""
    memory_peak: int = 0
    growth: tuple[float, int] = (0.0, 0)
    """(seconds, bytes): how much its memory grew, and in what time before that sample."""
    oom_kills: int = 0
    """The number of processes that the kernel's OOM killer ended at about the time when this one ended."""
    recent_oom_kills: int = 0
    """The number of processes that it ended in the half minute before; they may be data workers of this rank."""
    oom_of_group: bool = False
    """Whether these counts are of its own control group. Otherwise they are of the whole host, for any processes."""
    headroom: int | None = None
    """Bytes of host memory that were still available at the last sample; None: not known."""
    gpu_steps: tuple[int, int, int] | None = None
    """(first step, last step, bytes): growth of the GPU memory that steps leave in use; None if it did not grow."""
    host_steps: tuple[int, int, int] | None = None
    """The same for host memory."""
    limit: int | None = None
    """The memory limit of its control group in bytes."""

    @property
    def grew_into_the_limit(self) -> bool:
        """Whether, at the last sample, the growth of its memory was about to use up what was available."""
        _, grown = self.growth
        return self.headroom is not None and grown > 0 and self.headroom < max(grown, self.memory // 20)

    @property
    def waiting_s(self) -> float:
        """Seconds that it has been waiting in a collective; 0 if it does not wait."""
        return max(self.at - self.beat.called, 0.0) if self.beat is not None and self.beat.pending else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankObservation:
        """Return the observation whose fields `to_json` returned."""
        beat = None if values["beat"] is None else Beat.from_json(values["beat"])
        pairs = {
            name: tuple(values[name]) for name in ("growth", "gpu_steps", "host_steps") if values[name] is not None
        }
        return cls(**{**values, "beat": beat, **pairs})


_KEPT_LINES = 60
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a command that was stopped by SIGINT or SIGTERM before its end."""


@dataclass(slots=True)
class RankRecord:
    """What the launcher knows about one rank, before its start, while it runs, and after its end."""

    placement: RankPlacement
    pid: int | None = None
    """Process id on its host; None before it has started."""
    started: float | None = None
    """Time of its start in seconds since the epoch. All times here are by the launcher's clock."""
    exit_code: int | None = None
    """None while it runs; if a signal ended it, minus the signal's number."""
    ended: float | None = None
    ended_by_us: bool = False
    """Whether the launcher ended it, because another rank failed or the user asked to stop. Then it is not a cause."""
    lost: bool = False
    """Whether its host no longer answers, so that it is not known how it ended."""
    log: str | None = None
    """The file on its host with its output; None if that went to the console."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """The last lines that it printed."""
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
        """Whether it failed by itself, and was not ended by the launcher."""
        return self.lost or (bool(self.exit_code) and not self.ended_by_us and not self.stopped)


def new_records(job: Job, placements: Iterable[RankPlacement]) -> list[RankRecord]:
    """Return a record for each placement, of a rank that has not started yet."""
    return [RankRecord(placement, log=job.log_file(placement)) for placement in placements]


def record_end(record: RankRecord, code: int, *, by_us: bool) -> None:
    """Write the end of a rank into its record; `by_us`: the launcher ended it."""
    record.exit_code, record.ended, record.ended_by_us = code, time.time(), by_us


def causes(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the ranks that failed, the first one first; not those that the launcher ended because of them."""
    return sorted((record for record in records if record.failed), key=lambda record: record.ended or 0.0)


def exit_code(records: Sequence[RankRecord], *, hung: bool = False) -> int:
    """Return the exit code of the worst rank, as a shell reports it: 128 plus the number of a signal that ended it.

    It is 1 if the ranks `hung`: then the launcher has ended them.
    """
    if hung:
        return 1
    failed = causes(records)
    if not failed:
        # Ranks that were asked to stop have not finished the run: the exit code must not be 0.
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
"""Seconds that ranks may take to save and exit before they are restarted together with others."""


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How one attempt at a job ended."""

    code: int
    """The exit code for a shell."""
    records: Sequence[RankRecord]
    hung: bool = False
    interrupted: bool = False
    """Whether the user ended it."""
    reform: bool = False
    """Whether the ranks were asked to exit because others can join them now."""


# Seconds for which ranks are waited for when something has gone wrong.


FAILURE_WAIT_S = 2.0
"""Seconds that the other ranks keep running after one has failed, as they may report their own errors."""
GRACE_S = 10.0
"""Seconds that they may take to exit after SIGTERM. They cannot finish a step without the rank that failed."""
HANG_GRACE_S = 2.0
"""The same if the run hangs; it is shorter, as a rank that waits in a collective does not handle signals."""
STACK_WAIT_S = 0.5
"""Seconds that ranks may take to write their stacks."""
