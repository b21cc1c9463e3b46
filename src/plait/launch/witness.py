"""Gathers what is to be known of the ranks of this host: heartbeats, stacks, memory, last lines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plait.launch.evidence import Evidence
from plait.launch.memory import OomCounter, Trail
from plait.launch.records import Record
from plait.spec.beat import STACK_SIGNAL, read_beat

_LOG_BYTES = 1 << 14


class Witness:
    """Looks at ranks from outside, so that it sees also what those cannot tell who are gone or stuck."""

    def __init__(self, records: Sequence[Record], folder: Path) -> None:
        self._records = records
        self._folder = folder
        self._trails = {record.place.rank: Trail() for record in records}
        self._oom: OomCounter | None = None

    def begin(self) -> None:
        """The ranks have started."""
        pids = [record.pid for record in self._records if record.pid is not None]
        self._oom = OomCounter(pids[0] if pids else "self")

    def follow(self, record: Record) -> None:
        """Look at the memory of a rank that runs."""
        if record.pid is not None:
            self._trails[record.place.rank].follow(record.pid)

    def look(self, record: Record) -> Evidence:
        """Everything that is known of a rank now; kept in its record."""
        rank, trail = record.place.rank, self._trails[record.place.rank]
        beat = read_beat(self._folder / f"{rank}.beat")
        record.evidence = Evidence(
            beat=beat,
            at=time.time() if record.ended is None else record.ended,
            state=_state(record.pid if beat is None else beat.pid) if record.running else record.evidence.state,
            stacks=_text(self._folder / f"{rank}.stacks"),
            memory=trail.last,
            memory_peak=trail.peak,
            growth=trail.growth,
            oom_kills=0 if self._oom is None else self._oom.kills(),
            limit=None if self._oom is None else self._oom.limit,
        )
        record.message = _text(self._folder / str(rank))
        if record.log is not None:
            record.tail.clear()
            record.tail.extend(_text(Path(record.log), _LOG_BYTES).splitlines()[-(record.tail.maxlen or 0) :])
        return record.evidence

    def look_at_all(self) -> None:
        """At those that still run; the others were looked at when they ended."""
        for record in self._records:
            if record.running:
                self.look(record)

    def ask_for_stacks(self) -> None:
        """Of the ranks that run; those that are not prepared for it do not notice."""
        for record in self._records:
            if record.running and record.pid is not None:
                beat = read_beat(self._folder / f"{record.place.rank}.beat")
                with suppress(ProcessLookupError):
                    os.kill(record.pid if beat is None else beat.pid, STACK_SIGNAL)


def _state(pid: int | None) -> str:
    """One letter; a tracer that halts a process is a stop like any other."""
    _, _, facts = _text(Path(f"/proc/{pid}/stat")).rpartition(")")  # its name, before that, may hold anything
    return facts.split()[0].upper() if facts else ""


def _text(path: Path, last: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(file.seek(0, os.SEEK_END) - last, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
