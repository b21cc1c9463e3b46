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
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.errors import PlaitError
from plait.launch import signal_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error on its way out of the child. Errors with arguments of their own cannot be pickled as they are."""

    kind: type[PlaitError] | None
    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        if isinstance(error, PlaitError):
            return cls(type(error), str(error), vars(error))
        return cls(None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}", {})

    def reason(self) -> str:
        """Raises what somebody has to change in the run; anything else is a reason, with the way to where it arose."""
        if self.kind is None:
            return self.text
        error = self.kind.__new__(self.kind, self.text)
        error.__dict__.update(self.fields)
        raise error


def in_a_child(work: Callable[[], T], *, seconds: float) -> T | str:
    """What `work` returns, from a forked child; a reason where none comes. Without fork, it is done here.

    A `PlaitError` is raised here as well. Any other exception is a reason, with its traceback.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return work()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _answer(work, writing)
    os.close(writing)
    data: bytes | None = None
    try:
        data = _read(reading, seconds)
    finally:
        os.close(reading)
        if data != b"":
            os.kill(child, signal.SIGKILL)  # it has answered, or never will
        _, status = os.waitpid(child, 0)
    if data is None:
        return f"it took more than {seconds:.0f} s"
    if not data:
        return _how_it_ended(os.waitstatus_to_exitcode(status))
    # From our own child, through a pipe that nobody else holds.
    answer = pickle.loads(data)  # noqa: S301  # from a child of this process
    return answer.reason() if isinstance(answer, _Raised) else answer


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code} and without an answer"
    why = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    return f"it was ended by {signal_name(-code)}{why}"


def _answer(work: Callable[[], object], writing: int) -> None:
    """Work, write down the result, and end without a trace: nothing of the parent's must run here."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        try:
            data = pickle.dumps(work())
        except BaseException as error:
            data = pickle.dumps(_Raised.of(error))
        with os.fdopen(writing, "wb") as stream:
            stream.write(data)
        code = 0
    finally:
        os._exit(code)


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
