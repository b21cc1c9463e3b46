"""One voice for a run: every event goes to every sink, and no sink can stop the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from plait.monitor.console import ConsoleSink
from plait.spec import Event, EventKind, Sink


class Monitor:
    """Hands events to its sinks, in the given order.

    A sink that fails (a full disk, a lost connection) is closed and left out from then on, with one
    warning in the sinks that remain; training goes on.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        """Give the event to every sink."""
        for sink in self.sinks:
            self._call(sink, sink.write, event, at=event)

    def tick(self, step: int) -> None:
        """Tell the sinks that move with every step (a progress bar) that one is done."""
        for sink in self.sinks:
            if (tick := getattr(sink, "tick", None)) is not None:
                self._call(sink, tick, step)

    def close(self) -> None:
        """Close every sink, the last one first. A second call does nothing."""
        while self._sinks:
            sink = self._sinks[-1]
            self._call(sink, sink.close)
            if sink in self._sinks:
                self._sinks.remove(sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, sink: Sink, action: Callable[..., None], *arguments: object, at: Event | None = None) -> None:
        if sink not in self._sinks:  # it failed while an earlier sink's warning was passed on
            return
        try:
            action(*arguments)
        except Exception as error:
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            self._warn(f"{type(sink).__name__} failed and is off for the rest of the run: {_reason(error)}", at)

    def _warn(self, text: str, at: Event | None) -> None:
        step, epoch = (at.step, at.epoch) if at else (0, 0)
        if not any(isinstance(sink, ConsoleSink) for sink in self._sinks):
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed as well
                print(f"plait: {text}", file=sys.stderr, flush=True)
        self.emit(Event(EventKind.MESSAGE, step, epoch, {"level": "warning", "text": text}))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
