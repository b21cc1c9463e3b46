"""`train.csv`, `validate.csv`, `test.csv`: one row an event, for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from plait.monitor.scalars import scalars
from plait.spec import Event, EventKind

KINDS = (EventKind.TRAIN, EventKind.VALIDATE, EventKind.TEST)


class CsvSink:
    """A file for each kind of measurement. Files of an earlier run are continued."""

    def __init__(self, work_dir: Path) -> None:
        self._files = {kind: GrowingCsv(work_dir / f"{kind.value}.csv") for kind in KINDS}

    def write(self, event: Event) -> None:
        """Add a row for a measurement; other kinds have none."""
        if file := self._files.get(event.kind):
            file.append({"step": event.step, "epoch": event.epoch, "timestamp": event.time, **scalars(event)})

    def close(self) -> None:
        """Nothing is held open between rows."""


class GrowingCsv:
    """A CSV file whose header widens when a row brings a column that it did not have.

    Appending is the common case. A new column rewrites the file once, and leaves it empty in older rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: tuple[str, ...] = ()
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = tuple(next(csv.reader(file), ()))
            self._end_last_line()

    def append(self, row: dict[str, float]) -> None:
        """Add one row, complete on disk when this returns."""
        new = [key for key in row if key not in self._columns]
        if new:
            self._widen((*self._columns, *new))
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([row.get(column, "") for column in self._columns])

    def _widen(self, columns: Sequence[str]) -> None:
        rows: list[list[str]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))[1:]
        # Written beside and moved over it, so that no moment exists without a whole file.
        beside = self._path.with_suffix(".csv.tmp")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
        beside.replace(self._path)
        self._columns = tuple(columns)

    def _end_last_line(self) -> None:
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self._path.open("ab") as file:
                file.write(b"\r\n")
