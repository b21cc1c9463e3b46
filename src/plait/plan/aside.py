"""Doing something in a child, so that this process stays as it was.

A plan loads much that training does not need, and leaves caches behind. In a copy of the process it costs nothing
lasting, and whatever goes wrong there is no harm to the run.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_a_child(work: Callable[[], T], *, seconds: float) -> T | str:
    """What `work` returns, from a forked child; a reason where none comes. Without fork, it is done here."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return work()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _answer(work, writing)
    os.close(writing)
    try:
        data = _read(reading, seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it has answered, or never will
        os.waitpid(child, 0)
    if data is None:
        return f"it took more than {seconds:.0f} s"
    # From our own child, through a pipe that nobody else holds.
    return pickle.loads(data) if data else "it ended without an answer"  # noqa: S301


def _answer(work: Callable[[], object], writing: int) -> None:
    """Work, write down the result, and end without a trace: nothing of the parent's must run here."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        data = pickle.dumps(work())
        with os.fdopen(writing, "wb") as stream:
            stream.write(data)
    finally:
        os._exit(0)


def _read(reading: int, seconds: float) -> bytes | None:
    end = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reading, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
