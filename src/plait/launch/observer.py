"""Observes the ranks of this host from outside: heartbeats, stacks, memory, last lines of output."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from plait.launch.heartbeat import STACK_SIGNAL, read_beat
from plait.launch.records import RankObservation, RankRecord

# Memory: how much a rank held, whether it grew from step to step, and whether the OOM killer ended it.


_EVERY_S = 0.2
_KEPT = 64
_ROOT = Path("/sys/fs/cgroup")

_WARM_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 24, 512
_SECTIONS, _LEAST_GROWTH = 6, 0.1
"""Memory counts as growing if it grew in each of this many sections of the run, and by this share in total."""


class StepMemory:
    """The least memory in use during each step, which is what remains in use from one step to the next.

    If something keeps tensors of each step (a leak), this grows from step to step, however small micro-batches are.
    """

    def __init__(self) -> None:
        self._least: dict[int, int] = {}

    def add(self, step: int, used: int) -> None:
        """Add a sample: `used` bytes were in use during this step."""
        if step < _WARM_STEPS or not used:  # the optimizer's state and the allocator's caches are still growing
            return
        self._least[step] = min(used, self._least.get(step, used))
        if len(self._least) > _MOST_STEPS:
            items = list(self._least.items())
            pairs = zip(items[::2], items[1::2], strict=False)
            self._least = {step: min(first, second) for (step, first), (_, second) in pairs}

    @property
    def growth(self) -> tuple[int, int, int] | None:
        """(first step, last step, bytes by which memory grew between them); None unless it grew all the time.

        Samples are taken at arbitrary moments of a step, so the minimum over several steps is used.
        """
        steps = sorted(self._least)
        if len(steps) < _LEAST_STEPS:
            return None
        size = len(steps) // _SECTIONS
        floors = [min(self._least[step] for step in steps[at * size : (at + 1) * size]) for at in range(_SECTIONS)]
        grown = floors[-1] - floors[0]
        steadily = all(before < after for before, after in pairwise(floors))
        return (steps[0], steps[-1], grown) if steadily and grown > _LEAST_GROWTH * floors[-1] else None


class MemoryTrace:
    """The resident memory of a process over its last seconds, and at its peak."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        self._next = 0.0
        self.peak = 0

    def is_due(self) -> bool:
        """Return whether it is time for a sample; true a few times a second."""
        return time.monotonic() >= self._next

    def follow(self, pid: int) -> bool:
        """Take a sample of the process's memory; return whether the process exists."""
        now, resident = time.monotonic(), resident_bytes(pid)
        self._next = now + _EVERY_S
        if resident:
            self._samples.append((now, resident))
            self.peak = max(self.peak, resident)
        return bool(resident)

    @property
    def last(self) -> int:
        """Bytes of the last sample."""
        return self._samples[-1][1] if self._samples else 0

    @property
    def growth(self) -> tuple[float, int]:
        """(seconds, bytes): how much memory grew, and in what time before the last sample."""
        if not self._samples:
            return 0.0, 0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return end - start, last - first


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended, or the system does not report it."""
    return _pages(pid)[0]


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process without mapped files (such as data sets), which the kernel can evict."""
    resident, of_files = _pages(pid)
    return resident - of_files


def _pages(pid: int) -> tuple[int, int]:
    try:
        _, resident, of_files, *_ = _read(Path(f"/proc/{pid}/statm")).split()
    except ValueError:
        return 0, 0
    size = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * size, int(of_files) * size


class OomCounter:
    """Counts processes that the kernel's OOM killer has ended.

    It counts those of a process's control group if that has a counter (`memory.events`, or `memory.oom_control` in
    version 1); otherwise those of the whole host (`/proc/vmstat`), which may be unrelated processes.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._group = memory_group(pid)
        self.of_group = self._of_group() is not None
        """Whether it counts the processes of the control group alone."""

    def read(self) -> int:
        """Return the number of processes that were killed so far."""
        count = self._of_group()
        return (_number(_read(Path("/proc/vmstat"))) or 0) if count is None else count

    def headroom(self) -> int | None:
        """Return the bytes that are still available, in the control group or on the host; None if not known."""
        candidates = [available_bytes()]
        if self.limit is not None:
            names = ("memory.current", "memory.usage_in_bytes")
            used = next((text for name in names if (text := self._text(name)).isdecimal()), None)
            # The page cache counts as used memory, but the kernel frees it before it kills a process.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", self._text("memory.stat"), re.MULTILINE)
            if used is not None:
                candidates.append(max(self.limit - int(used) + (int(cached[1]) if cached else 0), 0))
        known = [bytes_ for bytes_ in candidates if bytes_ is not None]
        return min(known, default=None)

    @property
    def limit(self) -> int | None:
        """The memory limit of the control group in bytes; None without a limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = self._text(name)
            if text.isdecimal() and int(text) < 1 << 60:
                return int(text)
        return None

    def _of_group(self) -> int | None:
        return next(
            (n for name in ("memory.events", "memory.oom_control") if (n := _number(self._text(name))) is not None),
            None,
        )

    def _text(self, name: str) -> str:
        return "" if self._group is None else _read(self._group / name).strip()


def available_bytes() -> int | None:
    """Return the host memory that is available without swapping; None if the system does not report it."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) << 10 if match else None


def memory_group(pid: int | str) -> Path | None:
    """Return the folder of the control group that limits a process's memory; None if it is not found."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and (_ROOT / "cgroup.controllers").exists():
            folder = _ROOT / path.lstrip("/")
        elif "memory" in controllers.split(","):
            folder = _ROOT / "memory" / path.lstrip("/")
        else:
            continue
        # In a container, the path may be the one that the host sees, while the group is mounted at the root.
        return folder if folder.is_dir() else folder.parents[len(Path(path).parts) - 2]
    return None


def _number(text: str) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def cgroup_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


_LOG_BYTES = 1 << 14
_RECENT_S = 30.0
_LOOKS_OF_AN_END = 2


class Observer:
    """Observes ranks from another process, so also those that have died or hang and cannot report their state."""

    def __init__(self, records: Sequence[RankRecord], folder: Path) -> None:
        self._records = records
        self._folder = folder
        self._memory = {record.placement.rank: _RankMemory() for record in records}
        self._oom: OomCounter | None = None

    def begin(self) -> None:
        """Start to observe; call this when the ranks have been started."""
        pids = [record.pid for record in self._records if record.pid is not None]
        self._oom = OomCounter(pids[0] if pids else "self")
        for memory in self._memory.values():
            memory.note_kills(self._oom.read())

    def follow(self, record: RankRecord) -> None:
        """Sample the memory of a running rank."""
        rank, memory = record.placement.rank, self._memory[record.placement.rank]
        if record.pid is None or self._oom is None or not memory.resident.is_due():
            return
        kills = self._oom.read()
        if memory.resident.follow(record.pid):
            memory.note_kills(kills)
            memory.headroom = self._oom.headroom()
            beat = read_beat(self._folder / f"{rank}.beat")
            if beat is not None:
                memory.gpu.add(beat.step, beat.gpu)
                memory.host.add(beat.step, anonymous_bytes(record.pid))

    def look(self, record: RankRecord) -> RankObservation:
        """Return everything that can be observed of a rank now, and store it in the rank's record."""
        rank, memory, oom = record.placement.rank, self._memory[record.placement.rank], self._oom
        beat = read_beat(self._folder / f"{rank}.beat")
        kills, recent = (0, 0) if oom is None else memory.kills_since(oom.read())
        record.observation = RankObservation(
            beat=beat,
            at=time.time() if record.ended is None else record.ended,
            state=_state(record.pid if beat is None else beat.pid) if record.running else record.observation.state,
            stacks=_text(self._folder / f"{rank}.stacks"),
            memory=memory.resident.last,
            memory_peak=memory.resident.peak,
            growth=memory.resident.growth,
            oom_kills=kills,
            recent_oom_kills=recent,
            oom_of_group=oom is not None and oom.of_group,
            headroom=memory.headroom,
            gpu_steps=memory.gpu.growth,
            host_steps=memory.host.growth,
            limit=None if oom is None else oom.limit,
        )
        record.message = _text(self._folder / str(rank))
        if record.log is not None:
            record.tail.clear()
            record.tail.extend(_text(Path(record.log), _LOG_BYTES).splitlines()[-(record.tail.maxlen or 0) :])
        return record.observation

    def look_at_all(self) -> None:
        """Observe all running ranks; the others were observed when they ended."""
        for record in self._records:
            if record.running:
                self.look(record)

    def request_stacks(self) -> None:
        """Send all running ranks the signal to write their stacks; processes without a handler ignore it."""
        for record in self._records:
            if record.running and record.pid is not None:
                beat = read_beat(self._folder / f"{record.placement.rank}.beat")
                with suppress(ProcessLookupError):
                    os.kill(record.pid if beat is None else beat.pid, STACK_SIGNAL)


class _RankMemory:
    """The memory of one rank over time, and the number of OOM kills at each sample."""

    def __init__(self) -> None:
        self.resident, self.gpu, self.host = MemoryTrace(), StepMemory(), StepMemory()
        self.headroom: int | None = None
        self._kills: deque[tuple[float, int]] = deque()

    def note_kills(self, count: int) -> None:
        """Store the number of OOM kills so far, while the rank runs."""
        now = time.monotonic()
        self._kills.append((now, count))
        while len(self._kills) > _LOOKS_OF_AN_END and self._kills[1][0] < now - _RECENT_S:
            self._kills.popleft()

    def kills_since(self, count: int) -> tuple[int, int]:
        """Return how many OOM kills there were when the rank ended, and in the half minute before that.

        The kernel counts a kill before the process has ended, so the last sample may include it.
        """
        if not self._kills:
            return 0, 0
        return count - self._kills[-min(_LOOKS_OF_AN_END, len(self._kills))][1], count - self._kills[0][1]


def _state(pid: int | None) -> str:
    """Return the kernel's state of a process, one letter; `T` also if it was stopped by a tracer; empty if unknown."""
    _, _, facts = _text(Path(f"/proc/{pid}/stat")).rpartition(")")  # before it: its name, any text
    return facts.split()[0].upper() if facts else ""


def _text(path: Path, last: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(file.seek(0, os.SEEK_END) - last, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
