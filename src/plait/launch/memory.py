"""Host memory: what a rank held, and whether the kernel killed somebody for want of it."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from pathlib import Path

_EVERY_S = 0.2
_KEPT = 64
_ROOT = Path("/sys/fs/cgroup")


class Trail:
    """The resident memory of a process over its last seconds, and at its peak."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        self._next = 0.0
        self.peak = 0

    def follow(self, pid: int) -> None:
        """Take a sample of the process's memory, a few times a second at most."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_S
        resident = resident_bytes(pid)
        if resident:
            self._samples.append((now, resident))
            self.peak = max(self.peak, resident)

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
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class OomCounter:
    """Counts processes that the kernel killed for want of memory since this was made.

    Those of a process's control group where that has a counter (`memory.events`, or `memory.oom_control` in version 1),
    otherwise those of the whole host (`/proc/vmstat`).
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._group = memory_group(pid)
        self._before = self._counted()

    def kills(self) -> int:
        """How many were killed since this counter was made."""
        return self._counted() - self._before

    @property
    def limit(self) -> int | None:
        """Bytes that the control group may have; None without a limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(self._group / name).strip() if self._group is not None else ""
            if text.isdecimal() and int(text) < 1 << 60:
                return int(text)
        return None

    def _counted(self) -> int:
        if self._group is not None:
            for name in ("memory.events", "memory.oom_control"):
                if (found := _number(_read(self._group / name))) is not None:
                    return found
        return _number(_read(Path("/proc/vmstat"))) or 0


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
