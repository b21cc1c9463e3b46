"""The report: one HTML file that shows a run from its first step to its last, with nothing outside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from plait.monitor import page
from plait.monitor.beside import answers_card, picture_cards
from plait.monitor.history import history
from plait.monitor.jsonl import events_path, read_events
from plait.monitor.panels import loss_card, small_cards
from plait.spec import Event, EventKind


def write_report(
    source: Sequence[Path | str] | Sequence[Event],
    out: Path,
    title: str,
    samples: Sequence[tuple[str, str]] = (),
    folder: Path | None = None,
) -> None:
    """Write the report of a run to `out`, replacing an older one in one move.

    `source` is the run's events, or the files they were recorded in (`events-rank0.jsonl`, and those of
    other ranks for their messages). Every RUN_START opens a segment, so a run that was stopped and
    resumed, under another strategy or not, is one continued curve. `samples` are (title, text) pairs. `folder` is
    where the run left answers (`samples.jsonl`) and pictures, if it did.
    """
    events = [item for item in source if isinstance(item, Event)]
    paths = [item for item in source if not isinstance(item, Event)]
    story = history([*events, *read_events(paths)])
    body = (
        page.header(story, title),
        page.facts(story),
        loss_card(story),
        small_cards(story),
        "" if folder is None else answers_card(folder) + picture_cards(folder),
        page.card("Run" if len(story.segments) == 1 else "Segments", page.comparison(story)),
        page.card("Samples", page.samples(samples)),
        page.card("Checkpoints", page.checkpoints(story)),
        page.card("Messages", page.messages(story)),
        page.footer(time.time()),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.is_file():
        out.write_text(page.document(title, body), encoding="utf-8")  # a pipe or /dev/null: nothing may take its place
        return
    beside = out.with_name(out.name + ".tmp")
    beside.write_text(page.document(title, body), encoding="utf-8")
    beside.replace(out)


class HtmlSink:
    """Rewrites `work_dir/report.html` when a run ends, from the record of every run in `work_dir`."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._stale = False

    def write(self, event: Event) -> None:
        """Draw the report at RUN_END; until then only note that there is something to draw."""
        self._stale = True
        if event.kind is EventKind.RUN_END:
            self._draw()

    def close(self) -> None:
        """Draw the report of a run that was cut short."""
        if self._stale:
            self._draw()

    def _draw(self) -> None:
        others = sorted(self._work_dir.glob("events-rank*.jsonl"))
        first = events_path(self._work_dir, 0)
        write_report(
            [first, *(path for path in others if path != first)],
            self._work_dir / "report.html",
            self._work_dir.resolve().name,
            folder=self._work_dir,
        )
        self._stale = False
