"""What a person watching the run sees: a bar and lines on a terminal, lines alone in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TextIO

from plait.config import counted
from plait.monitor.line import event_line, level, prefix
from plait.monitor.table import Table, pairs, plain, tables
from plait.monitor.units import clock, number
from plait.spec import Event, EventKind

if TYPE_CHECKING:
    from plait.monitor.bar import Bar

Mode = Literal["bar", "plain"]


def choose_mode(setting: Literal["auto", "bar", "plain"], stream: TextIO) -> Mode:
    """What `log.console` means for this stream: a bar needs a terminal, so a pipe always gets plain lines."""
    return "bar" if setting != "plain" and stream.isatty() else "plain"


class ConsoleSink:
    """Shows a run on `stream`.

    `plain` writes whole lines and nothing else: no escape code, no carriage return. `bar` keeps a
    progress bar at the bottom of the terminal and prints the same lines above it.
    """

    def __init__(self, mode: Mode, stream: TextIO) -> None:
        self._screen: _Plain | Bar
        if mode == "bar":
            from plait.monitor.bar import Bar

            self._screen = Bar(stream)
        else:
            self._screen = _Plain(stream)
        self._by_epoch = True
        self._max_epochs: int | None = None

    def write(self, event: Event) -> None:
        """Show one event."""
        if event.kind is EventKind.RUN_START:
            for table in tables(event.data):
                self._screen.table(table)
            self._screen.start(event)
        elif event.kind is EventKind.RUN_END:
            self._screen.stop()
            self._screen.line(prefix(event), end_text(event), "info")
            if summary := event.data.get("summary"):
                self._screen.table(Table("Summary", pairs(summary)))
        else:
            if event.kind is EventKind.TRAIN:
                self._by_epoch = bool(event.data.get("by_epoch", True))
                self._max_epochs = event.data.get("max_epochs")
                self._screen.progress(event)
            line = event_line(event, by_epoch=self._by_epoch, max_epochs=self._max_epochs)
            if line is not None:
                head = prefix(event)
                self._screen.line(head, line.removeprefix(head), level(event))

    def tick(self, step: int) -> None:
        """Move the bar to `step`; cheap enough to be called after every step."""
        self._screen.tick(step)

    def close(self) -> None:
        """Give the terminal back. The stream stays open: it belongs to the caller."""
        self._screen.stop()


def end_text(event: Event) -> str:
    """How the run ended: `Run ended (finished): 1960 steps in 0:06:14`."""
    data = event.data
    reason = f" ({data['reason']})" if data.get("reason") else ""
    seconds = number(data.get("seconds"))
    took = f" in {clock(seconds)}" if seconds is not None else ""
    return f"Run ended{reason}: {counted(data.get('steps', event.step), 'step')}{took}"


def spelled(text: str, stream: TextIO) -> str:
    """The text as `stream` can show it: `?` for what its encoding lacks, rather than the end of the run."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class _Plain:
    """Lines on a stream that may be a file, a pipe or a log collector."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def table(self, table: Table) -> None:
        self._put(plain(table) + "\n")

    def line(self, head: str, text: str, level: str) -> None:
        self._put(head + text)

    def start(self, event: Event) -> None: ...

    def progress(self, event: Event) -> None: ...

    def tick(self, step: int) -> None: ...

    def stop(self) -> None: ...

    def _put(self, text: str) -> None:
        self._stream.write(spelled(text, self._stream).replace("\r", "") + "\n")
        self._stream.flush()
