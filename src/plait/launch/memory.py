"""Memory: what a rank held, whether it grew from step to step, and whether the kernel killed it for want of memory."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

_EVERY_S = 0.2
_KEPT = 64
_ROOT = Path("/sys/fs/cgroup")

_WARM_STEPS, _LEAST_STEPS, _MOST_STEPS = 2, 24, 512
_PARTS, _SHARE = 6, 0.1
"""Memory grows from step to step where it does in every one of so many parts of the run, and by so much in all."""


class StepMemory:
    """The least memory that was in use at each step: what a step leaves to the next one.

    Where something keeps what belongs to a step, that grows from step to step, however small the micro-batches are.
    """

    def __init__(self) -> None:
        self._least: dict[int, int] = {}

    def add(self, step: int, used: int) -> None:
        """So many bytes are in use at this step."""
        if step < _WARM_STEPS or not used:  # the optimizer's state and the allocator's caches are still growing
            return
        self._least[step] = min(used, self._least.get(step, used))
        if len(self._least) > _MOST_STEPS:
            items = list(self._least.items())
            pairs = zip(items[::2], items[1::2], strict=False)
            self._least = {step: min(first, second) for (step, first), (_, second) in pairs}

    @property
    def growth(self) -> tuple[int, int, int] | None:
        """From which step to which it has grown by how many bytes; None where it has not, part after part of the run.

        Looks come at any moment of a step, so the least of several steps is what counts.
        """
        steps = sorted(self._least)
        if len(steps) < _LEAST_STEPS:
            return None
        size = len(steps) // _PARTS
        floors = [min(self._least[step] for step in steps[at * size : (at + 1) * size]) for at in range(_PARTS)]
        grown = floors[-1] - floors[0]
        steadily = all(before < after for before, after in pairwise(floors))
        return (steps[0], steps[-1], grown) if steadily and grown > _SHARE * floors[-1] else None


class Trail:
    """The resident memory of a process over its last seconds, and at its peak."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        self._next = 0.0
        self.peak = 0

    def is_due(self) -> bool:
        """Whether it is time for a sample: a few times a second."""
        return time.monotonic() >= self._next

    def follow(self, pid: int) -> bool:
        """Take a sample of the process's memory; whether there is such a process."""
        now, resident = time.monotonic(), resident_bytes(pid)
        self._next = now + _EVERY_S
        if resident:
            self._samples.append((now, resident))
            self.peak = max(self.peak, resident)
        return bool(resident)

    @property
    def last(self) -> int:
        """What it held when it was last seen."""
        return self._samples[-1][1] if self._samples else 0

    @property
    def growth(self) -> tuple[float, int]:
        """Over how many seconds before that it grew by how much."""
        if not self._samples:
            return 0.0, 0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return end - start, last - first


def resident_bytes(pid: int) -> int:
    """Of a process; 0 where it is gone, or where the system does not say."""
    return _pages(pid)[0]


def anonymous_bytes(pid: int) -> int:
    """The part of it that belongs to no file: of a mapped data set ever more is resident, and can be given back."""
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
    """Counts processes that the kernel has killed for want of memory.

    Those of a process's own control group where that has a counter (`memory.events`, or `memory.oom_control` in version
    1), otherwise those of the whole host (`/proc/vmstat`), of which nobody knows who they were.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._group = memory_group(pid)
        self.of_group = self._of_group() is not None
        """Whether it counts the processes of the control group alone."""

    def read(self) -> int:
        """How many there have been."""
        found = self._of_group()
        return (_number(_read(Path("/proc/vmstat"))) or 0) if found is None else found

    def headroom(self) -> int | None:
        """Bytes that a process may still take: of the control group, or of the host; None where nobody says."""
        found = [available_bytes()]
        if self.limit is not None:
            names = ("memory.current", "memory.usage_in_bytes")
            used = next((text for name in names if (text := self._text(name)).isdecimal()), None)
            # What the page cache holds is counted as used, and given back before anybody is killed.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", self._text("memory.stat"), re.MULTILINE)
            if used is not None:
                found.append(max(self.limit - int(used) + (int(cached[1]) if cached else 0), 0))
        known = [bytes_ for bytes_ in found if bytes_ is not None]
        return min(known, default=None)

    @property
    def limit(self) -> int | None:
        """Bytes that the control group may have; None without a limit."""
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
    """Of the host, that a process could take without swapping; None where the system does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def memory_group(pid: int | str) -> Path | None:
    """The folder of the control group that limits a process's memory."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and (_ROOT / "cgroup.controllers").exists():
            folder = _ROOT / path.lstrip("/")
        elif "memory" in controllers.split(","):
            folder = _ROOT / "memory" / path.lstrip("/")
        else:
            continue
        # Inside a container the path may be that of the host, while the group is mounted at the root.
        return folder if folder.is_dir() else folder.parents[len(Path(path).parts) - 2]
    return None


def _number(text: str) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
