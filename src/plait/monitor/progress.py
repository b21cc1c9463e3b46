"""The progress bar at the bottom of a terminal. The only module that imports rich."""

from __future__ import annotations

import time
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from plait.monitor.events import Event
from plait.monitor.format import Table, as_number, format_clock, format_count, format_decimal

REFRESH_S = 0.2
COLOURS = {"info": "default", "warning": "yellow", "error": "bold red"}


class Bar:
    """Two rows at the bottom of the terminal: the progress of the run, and its last measurements.

    It is drawn at an event or tick, at most every `REFRESH_S` seconds, and never from another thread: a
    thread that holds the terminal's lock while data workers fork would deadlock them.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._began = self._drawn = time.monotonic()
        self._step = 0
        self._epoch = 0
        self._total: int | None = None
        self._data: dict[str, Any] = {}
        self._measured = self._began

    def table(self, table: Table) -> None:
        """Print a two-column table above the bar."""
        grid = RichTable(
            title=table.title or None, title_justify="left", title_style="bold", box=box.ROUNDED,
            show_header=False,
        )  # fmt: skip
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in table.rows:
            grid.add_row(Text(label), Text(value))
        self._console.print(grid)

    def line(self, head: str, text: str, level: str) -> None:
        """Print a log line above the bar: its head dimmed, a warning or error in colour."""
        colour = COLOURS.get(level, "default")
        self._console.print(Text.assemble((head, "dim" if level == "info" else colour), (text, colour)), soft_wrap=True)

    def start(self, event: Event) -> None:
        """Show the bar."""
        self._began = time.monotonic()
        self._step, self._total = event.step, event.data.get("max_steps")
        self._open()

    def progress(self, event: Event) -> None:
        """Show new measurements."""
        self._step, self._epoch, self._data = event.step, event.epoch, dict(event.data)
        self._total = self._data.get("max_steps") or self._total
        self._measured = time.monotonic()
        self._open()
        self._refresh()

    def tick(self, step: int) -> None:
        """Move to `step`; drawn only if the last refresh is old enough."""
        self._step = step
        if time.monotonic() - self._drawn >= REFRESH_S:
            self._refresh()

    def stop(self) -> None:
        """Remove the bar and restore the cursor."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _open(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
            self._drawn = time.monotonic()

    def _render(self) -> RenderableType:
        now = time.monotonic()
        row = RichTable.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_column(no_wrap=True, justify="right")
        count = f"{self._step}/{self._total}" if self._total else f"step {self._step}"
        row.add_row(
            Text(self._label(), "bold"),
            ProgressBar(total=self._total or 1, completed=self._step if self._total else 0),
            Text(count),
            Text(self._times(now), "dim"),
        )
        return Group(row, self._measures())

    def _label(self) -> str:
        if self._data.get("by_epoch") and self._epoch:
            of = self._data.get("max_epochs")
            return f"Epoch {self._epoch}/{of}" if of else f"Epoch {self._epoch}"
        return "Training"

    def _times(self, now: float) -> str:
        elapsed = format_clock(now - self._began)
        eta = as_number(self._data.get("eta"))
        if eta is None:
            return elapsed
        return f"{elapsed} · {format_clock(max(0.0, eta - (now - self._measured)))} left"

    def _measures(self) -> Text:
        forms = (
            ("loss", "loss {}", format_decimal),
            ("lr", "lr {}", lambda value: f"{value:.2e}"),
            ("tokens_per_s", "{} tok/s", format_count),
            ("samples_per_s", "{} samples/s", format_count),
            ("grad_norm", "grad norm {}", format_decimal),
            ("mfu", "mfu {}", lambda value: f"{value:.1%}"),
        )
        # Of tokens and samples only tokens are shown, as the row has to fit 80 columns.
        hidden = "samples_per_s" if self._data.get("tokens_per_s") is not None else ""
        values = ((key, text, form, as_number(self._data.get(key))) for key, text, form in forms)
        texts = [text.format(form(v)) for key, text, form, v in values if v is not None and key != hidden]
        text = " · ".join(texts) if texts else "waiting for the first measurement"
        return Text(text, "cyan" if texts else "dim", no_wrap=True, overflow="ellipsis")
