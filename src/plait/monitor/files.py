"""The file sinks: `events-rank*.jsonl`, from which reports are made, and CSV tables."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.config import parse_json
from plait.errors import DataError
from plait.monitor.events import Event, EventKind
from plait.monitor.format import scalars, tables

MEASUREMENTS = (EventKind.TRAIN, EventKind.VALIDATE, EventKind.TEST)


def events_path(work_dir: Path, rank: int) -> Path:
    """Return the path of the events of a rank."""
    return work_dir / f"events-rank{rank}.jsonl"


class JsonlSink:
    """Appends every event to `events-rank{r}.jsonl` and flushes it, so that a crash loses no event.

    The file of an earlier run is continued, never truncated: a resumed run is the next segment of the same history.
    """

    every_rank = True

    def __init__(self, work_dir: Path, rank: int) -> None:
        self._rank = rank
        path = events_path(work_dir, rank)
        torn = _ends_within_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, event: Event) -> None:
        """Write one line and flush it."""
        self._file.write(encode(event, self._rank) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def encode(event: Event, rank: int) -> str:
    """Return the event as one line of valid JSON; NaN and infinities, which JSON lacks, become strings."""
    record = {
        "kind": event.kind.value,
        "step": event.step,
        "epoch": event.epoch,
        "time": event.time,
        "rank": rank,
        "data": event.data,
    }
    return json.dumps(plain_json(record), ensure_ascii=False, allow_nan=False)


def plain_json(value: Any) -> Any:
    """Return a value as strict JSON has it: NaN and infinities are strings, tensors of one element are numbers."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(item) for item in value]
    # A scalar of another library (numpy's, or a tensor of one element) converts itself to Python's.
    item = getattr(value, "item", None)
    return plain_json(item()) if callable(item) and getattr(value, "ndim", 1) == 0 else str(value)


def _revive(value: Any) -> Any:
    """Return the value with the strings for NaN and infinities converted to numbers."""
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def _ends_within_a_line(path: Path) -> bool:
    """Whether the last line of a file is incomplete, because an earlier run was killed during a write."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def read_events(paths: Iterable[Path | str]) -> list[Event]:
    """Return the events of a run from the files of its ranks, in the order of the paths.

    Of rank 0 all events are returned, of the others only messages, marked with `rank`. A line that a crash
    left incomplete is skipped, as is a kind that a later version may have added.
    """
    return [event for path in paths for event in _read(Path(path))]


def _read(path: Path) -> Iterator[Event]:
    known = set(EventKind)
    try:
        opened = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with opened as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or str(record.get("kind")) not in known:
                continue
            event_kind, rank, data = EventKind(record["kind"]), record.get("rank", 0), record.get("data", {})
            step, epoch, moment = _checked(record, event_kind, data, f"{path}, line {number}")
            if event_kind in MEASUREMENTS:
                data = _revive(data)
            if rank == 0:
                yield Event(event_kind, step, epoch, data, moment)
            elif event_kind is EventKind.MESSAGE:
                yield Event(event_kind, step, epoch, {**data, "rank": rank}, moment)


_LATEST = 250_000_000_000
"""Seconds since 1970 up to which `datetime` has dates."""


def _checked(record: Mapping[str, Any], event_kind: EventKind, data: Any, where: str) -> tuple[int, int, float]:
    """Return step, epoch and time of an event; raise a `DataError` with the line for a value of another type."""
    step, epoch, moment = (record.get(key) for key in ("step", "epoch", "time"))
    if type(step) is not int or type(epoch) is not int:
        raise DataError(f"{where}: step is {step!r:.40} and epoch {epoch!r:.40}, expected two numbers; remove the line")
    if not isinstance(moment, int | float) or not 0 <= moment < _LATEST:
        raise DataError(f"{where}: time is {moment!r:.40}, expected seconds since 1970; remove the line")
    if not isinstance(data, dict) or not isinstance(data.get("metrics", {}), dict):
        raise DataError(f"{where}: data is {data!r:.80}, expected an object; remove the line")
    if event_kind is EventKind.RUN_START:
        try:
            tables(data)
        except (TypeError, ValueError):
            raise DataError(f"{where}: its rows are not labels with values; remove the line") from None
    return step, epoch, moment


# `train.csv`, `validate.csv`, `test.csv`: one row per event.


class CsvSink:
    """Writes one file for each kind of measurement. Files of an earlier run are continued."""

    def __init__(self, work_dir: Path) -> None:
        self._files = {measurement: CsvFile(work_dir / f"{measurement.value}.csv") for measurement in MEASUREMENTS}

    def write(self, event: Event) -> None:
        """Add a row for a measurement; ignore other kinds."""
        if file := self._files.get(event.kind):
            file.append({"step": event.step, "epoch": event.epoch, "timestamp": event.time, **scalars(event)})

    def close(self) -> None:
        """Do nothing: no file is open between rows."""


class CsvFile:
    """A CSV file that gets a new column when a row has one.

    Usually a row is appended. A new column rewrites the file once, with empty cells in older rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: tuple[str, ...] = ()
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = tuple(next(csv.reader(file), ()))
            self._end_last_line()

    def append(self, row: dict[str, float]) -> None:
        """Append one row and close the file."""
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
        # Written under another name and renamed, so that the file is complete at any moment.
        temporary = self._path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(columns)
            table.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
        temporary.replace(self._path)
        self._columns = tuple(columns)

    def _end_last_line(self) -> None:
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self._path.open("ab") as file:
                file.write(b"\r\n")
