"""The console sink: a progress bar and log lines on a terminal, log lines alone in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

from plait.config import counted
from plait.monitor.events import Event, EventKind
from plait.monitor.format import (
    Table,
    as_number,
    format_bytes,
    format_clock,
    format_count,
    format_decimal,
    format_duration,
    pairs,
    plain,
    tables,
)

if TYPE_CHECKING:
    from plait.monitor.progress import Bar

# The classic log line: `07/03 13:04:17 - plait - INFO - Epoch(train)  [1][ 10/196]  lr: 3.3333e-04  …`.


EVALUATIONS = {EventKind.VALIDATE: "val", EventKind.TEST: "test"}


def event_line(event: Event, *, by_epoch: bool = True, max_epochs: int | None = None) -> str | None:
    """Return the log line of an event, or None for a kind that is shown in another form.

    `by_epoch` and `max_epochs` are used for evaluations; a TRAIN event has its own.
    """
    if event.kind is EventKind.TRAIN:
        text = train_text(event)
    elif event.kind in EVALUATIONS:
        text = evaluation_text(event, by_epoch=by_epoch, max_epochs=max_epochs)
    elif event.kind is EventKind.SAVE:
        text = save_text(event)
    elif event.kind is EventKind.MESSAGE:
        text = str(event.data.get("text", ""))
    else:
        return None
    return prefix(event) + text


def prefix(event: Event) -> str:
    """Return date, time, name and level: `07/03 13:04:17 - plait - INFO - `."""
    stamp = datetime.fromtimestamp(event.time).strftime("%m/%d %H:%M:%S")
    return f"{stamp} - plait - {level(event).upper()} - "


def level(event: Event) -> str:
    """Return the level: that of a message, `info` for other events."""
    return str(event.data.get("level", "info")) if event.kind is EventKind.MESSAGE else "info"


def train_text(event: Event) -> str:
    """Return the measurements of a TRAIN event as text: learning rate, time, memory, loss, …"""
    data = event.data
    if data.get("by_epoch", True):
        epoch = _epoch(event.epoch, data.get("max_epochs"))
        position = f"Epoch(train){epoch}{_count(data.get('step_in_epoch', event.step), data.get('steps_per_epoch'))}"
    else:
        position = f"Iter(train) {_count(event.step, data.get('max_steps'))}"
    return "  ".join([position, *_train_metrics(data)])


def _train_metrics(data: Any) -> Iterator[str]:
    forms: dict[str, tuple[str, Callable[[float], str]]] = {
        "lr": ("lr", lambda v: f"{v:.4e}"),
        "eta": ("eta", format_clock),
        "time": ("time", lambda v: f"{v:.4f}"),
        "data_time": ("data_time", lambda v: f"{v:.4f}"),
        "memory": ("memory", lambda v: f"{v:.0f}"),
        "loss": ("loss", format_decimal),
        "grad_norm": ("grad_norm", format_decimal),
        "reward": ("reward", format_decimal),
        "accuracy": ("accuracy", format_decimal),
        "kl": ("kl", format_decimal),
        "tokens_per_s": ("tokens/s", format_count),
        "mfu": ("mfu", lambda v: f"{v:.1%}"),
        "loss_scale": ("loss_scale", lambda v: f"{v:g}"),
    }
    for key, (label, form) in forms.items():
        if (value := as_number(data.get(key))) is not None:
            yield f"{label}: {form(value)}"
    if skipped := data.get("skipped"):
        yield f"skipped: {skipped}"


def evaluation_text(event: Event, *, by_epoch: bool = True, max_epochs: int | None = None) -> str:
    """Return the metrics of a VALIDATE or TEST event as text. A test has no epoch: it runs once, at the end."""
    data, split = event.data, EVALUATIONS[event.kind]
    count = _count(data.get("batches", 0), data.get("batches", 0))
    if not data.get("by_epoch", by_epoch):
        position = f"Iter({split}) {count}"
    elif event.kind is EventKind.TEST:
        position = f"Epoch({split})  {count}"
    else:
        position = f"Epoch({split}){_epoch(event.epoch, data.get('max_epochs', max_epochs))}{count}"
    metrics = [f"{key}: {_metric(value)}" for key, value in data.get("metrics", {}).items()]
    if (seconds := as_number(data.get("time"))) is not None:
        metrics.append(f"time: {seconds:.4f}")
    return "  ".join([position, *metrics])


def save_text(event: Event) -> str:
    """Return the path, size and duration of a save as text."""
    data = event.data
    cost = []
    if (count := as_number(data.get("bytes"))) is not None:
        cost.append(format_bytes(count))
    if (seconds := as_number(data.get("seconds"))) is not None:
        cost.append(format_duration(seconds))
    text = " in ".join(cost)
    blocked = as_number(data.get("blocked"))
    if seconds is not None and blocked is not None and blocked < seconds:
        text += f"; training waited {format_duration(blocked)}"
    return f"Saved {data.get('path', 'a checkpoint')}" + (f"  ({text})" if text else "")


def _epoch(epoch: int, max_epochs: int | None) -> str:
    # Padded to the width of the last epoch's number, so that the brackets are aligned.
    return f"[{epoch}]".rjust((len(str(max_epochs)) if max_epochs else 2) + 3)


def _count(step: int, total: int | None) -> str:
    return f"[{step:>{len(str(total))}}/{total}]" if total is not None else f"[{step}]"


def _metric(value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    converted = as_number(value)
    return str(value) if converted is None else format_decimal(converted)


Mode = Literal["bar", "plain"]


def choose_mode(setting: Literal["auto", "bar", "plain"], stream: TextIO) -> Mode:
    """Return the mode for `log.console` on this stream: a bar needs a terminal, so a pipe always gets lines."""
    return "bar" if setting != "plain" and stream.isatty() else "plain"


class ConsoleSink:
    """Prints a run to `stream`.

    `plain` writes lines without escape codes or carriage returns. `bar` shows a progress bar at the bottom of the
    terminal and prints the same lines above it.
    """

    def __init__(self, mode: Mode, stream: TextIO) -> None:
        self._screen: _Plain | Bar
        if mode == "bar":
            from plait.monitor.progress import Bar

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
        """Move the bar to `step`; cheap enough for every step."""
        self._screen.tick(step)

    def close(self) -> None:
        """Remove the bar. The stream stays open: it belongs to the caller."""
        self._screen.stop()


def end_text(event: Event) -> str:
    """Return how the run ended: `Run ended (finished): 1960 steps in 0:06:14`."""
    data = event.data
    reason = f" ({data['reason']})" if data.get("reason") else ""
    seconds = as_number(data.get("seconds"))
    took = f" in {format_clock(seconds)}" if seconds is not None else ""
    return f"Run ended{reason}: {counted(data.get('steps', event.step), 'step')}{took}"


def encodable(text: str, stream: TextIO) -> str:
    """Return the text with `?` for characters that the encoding of `stream` lacks; writing those would raise."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class _Plain:
    """Prints lines to a stream that may be a file, a pipe or a log collector."""

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
        self._stream.write(encodable(text, self._stream).replace("\r", "") + "\n")
        self._stream.flush()
