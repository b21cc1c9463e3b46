"""Processes that tests started, directly or not."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether it has ended; its parent may not have noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it may vanish at any moment, also while its file is read
        return True
    return state == "Z"


def assert_gone(pids: list[int]) -> None:
    """They end within half a minute."""
    deadline = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if not gone(pid)]} are still there"
        time.sleep(0.02)
