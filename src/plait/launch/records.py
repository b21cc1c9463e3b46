"""Every rank of a launch: where it is, how it is doing, how it ended. Whoever explains a failure reads it here."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plait.launch.evidence import Evidence
from plait.launch.job import Job, Place
from plait.spec import Phase

_KEPT_LINES = 60
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a command that was told to stop before its end."""


@dataclass(slots=True)
class Record:
    """One rank, from before its start to after its end."""

    place: Place
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
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def running(self) -> bool:
        """Whether it is still to be waited for."""
        return self.exit_code is None and not self.lost

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, by whomever, and then saved and left. Its exit code names the signal."""
        beat = self.evidence.beat
        return self.exit_code in STOPPED_CODES and beat is not None and beat.phase is Phase.LEFT

    @property
    def failed(self) -> bool:
        """Whether it ended badly of itself."""
        return self.lost or (bool(self.exit_code) and not self.ended_by_us and not self.stopped)


def new_records(job: Job, places: Iterable[Place]) -> list[Record]:
    """Records of ranks that have not started yet."""
    return [Record(place, log=job.log_file(place)) for place in places]


def note_end(record: Record, code: int, *, by_us: bool) -> None:
    """Write down that a rank has ended; `by_us`: it was told to."""
    record.exit_code, record.ended, record.ended_by_us = code, time.time(), by_us


def causes(records: Sequence[Record]) -> list[Record]:
    """The ranks that failed of themselves, the first one first. The others are victims."""
    return sorted((record for record in records if record.failed), key=lambda record: record.ended or 0.0)


def exit_code(records: Sequence[Record], *, hung: bool = False) -> int:
    """That of the worst rank, as a shell has it: 128 and the signal where there was one.

    Ranks that `hung` say nothing with theirs: how they were ended is the launcher's doing.
    """
    if hung:
        return 1
    failed = causes(records)
    if not failed:
        # Told to go, and gone before the end: still no success, whoever said so.
        told = [record for record in records if record.stopped] or records
        return max((_shell(record.exit_code or 0) for record in told), default=0)
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
