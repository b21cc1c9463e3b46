"""Gathers what is to be known of the ranks of this host: heartbeats, stacks, memory, last lines."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plait.launch.evidence import Evidence
from plait.launch.memory import OomCounter, StepMemory, Trail, anonymous_bytes
from plait.launch.records import Record
from plait.spec import STACK_SIGNAL, read_beat

_LOG_BYTES = 1 << 14
_RECENT_S = 30.0
_LOOKS_OF_AN_END = 2


class Witness:
    """Looks at ranks from outside, so that it sees also what those cannot tell who are gone or stuck."""

    def __init__(self, records: Sequence[Record], folder: Path) -> None:
        self._records = records
        self._folder = folder
        self._trails = {record.place.rank: _Trails() for record in records}
        self._oom: OomCounter | None = None

    def begin(self) -> None:
        """The ranks have started."""
        pids = [record.pid for record in self._records if record.pid is not None]
        self._oom = OomCounter(pids[0] if pids else "self")
        for trails in self._trails.values():
            trails.note_kills(self._oom.read())

    def follow(self, record: Record) -> None:
        """Look at the memory of a rank that runs."""
        rank, trails = record.place.rank, self._trails[record.place.rank]
        if record.pid is None or self._oom is None or not trails.resident.is_due():
            return
        kills = self._oom.read()
        if trails.resident.follow(record.pid):
            trails.note_kills(kills)
            trails.headroom = self._oom.headroom()
            beat = read_beat(self._folder / f"{rank}.beat")
            if beat is not None:
                trails.gpu.add(beat.step, beat.gpu)
                trails.host.add(beat.step, anonymous_bytes(record.pid))

    def look(self, record: Record) -> Evidence:
        """Everything that is known of a rank now; kept in its record."""
        rank, trails, oom = record.place.rank, self._trails[record.place.rank], self._oom
        beat = read_beat(self._folder / f"{rank}.beat")
        kills, recent = (0, 0) if oom is None else trails.kills_since(oom.read())
        record.evidence = Evidence(
            beat=beat,
            at=time.time() if record.ended is None else record.ended,
            state=_state(record.pid if beat is None else beat.pid) if record.running else record.evidence.state,
            stacks=_text(self._folder / f"{rank}.stacks"),
            memory=trails.resident.last,
            memory_peak=trails.resident.peak,
            growth=trails.resident.growth,
            oom_kills=kills,
            recent_oom_kills=recent,
            oom_of_group=oom is not None and oom.of_group,
            headroom=trails.headroom,
            gpu_steps=trails.gpu.growth,
            host_steps=trails.host.growth,
            limit=None if oom is None else oom.limit,
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


class _Trails:
    """The memory of one rank, as it was followed, and the kernel's kills meanwhile."""

    def __init__(self) -> None:
        self.resident, self.gpu, self.host = Trail(), StepMemory(), StepMemory()
        self.headroom: int | None = None
        self._kills: deque[tuple[float, int]] = deque()

    def note_kills(self, count: int) -> None:
        """How many there have been by now, while the rank is seen to run."""
        now = time.monotonic()
        self._kills.append((now, count))
        while len(self._kills) > _LOOKS_OF_AN_END and self._kills[1][0] < now - _RECENT_S:
            self._kills.popleft()

    def kills_since(self, count: int) -> tuple[int, int]:
        """How many there were about its end, and in the half minute before.

        The kernel counts a kill before the process is gone, so the last look may have seen the one and the other.
        """
        if not self._kills:
            return 0, 0
        return count - self._kills[-min(_LOOKS_OF_AN_END, len(self._kills))][1], count - self._kills[0][1]


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
