"""Ctrl-C and SIGTERM end a run cleanly: after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType, TracebackType
from typing import Any

from plait.launch import STOPPED_CODES

STOPPED: Mapping[str, int] = MappingProxyType(dict(zip(("Ctrl-C", "SIGTERM"), STOPPED_CODES, strict=True)))
"""Reasons why a run was stopped from outside, and the exit codes of whoever ends by such a signal."""


class StopSignals:
    """While open, the first signal calls `ask`; a second Ctrl-C interrupts at once.

    A signal that was ignored when the process started (`nohup`, `trap '' INT`, what a script starts with `&`) stays so.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._previous: dict[int, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            numbers = (signal.SIGINT, signal.SIGTERM)
            for number in (each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._received)
        return self

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self._ask("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
