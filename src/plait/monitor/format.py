"""Formatting numbers, durations and sizes, and tables for the console."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from plait.monitor.events import Event, EventKind


def as_number(value: Any) -> float | None:
    """Return the value as a float (NaN and infinities included), or None where it is not a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def format_decimal(value: float) -> str:
    """Return four decimals, with an exponent for very small or large values: `6.1887`, `3.1000e-05`."""
    if isinstance(value, int):
        return str(value)
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.4e}"


def format_count(value: float) -> str:
    """Return three digits and a letter: `980`, `12.3k`, `1.20M`."""
    if not math.isfinite(value):
        return str(value)
    for format_bytes, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999 950 would round to `1000.0k`, so the next letter starts a little before its power.
        if abs(value) >= format_bytes * 0.99995:
            scaled = value / format_bytes
            return f"{scaled:.2f}{letter}" if letter != "k" and abs(scaled) < 9.995 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def format_clock(seconds: float) -> str:
    """Return hours, minutes and seconds: `0:13:14`; `?` where the number is not finite or too large."""
    if not math.isfinite(seconds) or abs(seconds) > timedelta.max.total_seconds():
        return "?"
    return str(timedelta(seconds=int(seconds)))


def format_duration(seconds: float) -> str:
    """Return a duration, in seconds where it is short: `0.41 s`, `12.3 s`, `0:13:14`."""
    if not math.isfinite(seconds) or seconds >= 60:
        return format_clock(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit: `512 B`, `3.4 MiB`, `1.2 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


# Two-column tables: the settings of a run, and its summary.


@dataclass(frozen=True, slots=True)
class Table:
    """A title and (label, value) rows."""

    title: str
    rows: tuple[tuple[str, str], ...]


def tables(data: Mapping[str, Any]) -> tuple[Table, ...]:
    """Return the tables in a RUN_START: its own title and rows, and every section that has these two keys."""
    return tuple(_find(data))


def _find(data: Mapping[str, Any]) -> Iterator[Table]:
    if "rows" in data:
        yield Table(str(data.get("title", "")), pairs(data["rows"]))
    for value in data.values():
        if isinstance(value, Mapping):
            yield from _find(value)


def pairs(rows: Sequence[Sequence[Any]]) -> tuple[tuple[str, str], ...]:
    """Return rows as text, whether they come from Python (tuples) or from a file (lists)."""
    return tuple((str(label), str(value)) for label, value in rows)


def plain(table: Table) -> str:
    """Return the table as aligned lines without markup."""
    width = max((len(label) for label, _ in table.rows), default=0)
    indent = "\n" + " " * (width + 4)
    lines = [f"  {label:<{width}}  {value}".replace("\n", indent).rstrip() for label, value in table.rows]
    rule = "-" * max((len(line) for text in lines for line in text.splitlines()), default=0)
    return "\n".join([table.title, rule, *lines] if table.title else lines)


# The measurements of an event, which become curves.


BOOKKEEPING = frozenset({"eta", "step_in_epoch", "steps_per_epoch", "max_steps", "max_epochs", "by_epoch"})
"""Keys of a TRAIN event that are positions in the run, not measurements."""


def scalars(event: Event) -> dict[str, float]:
    """Return name and value of everything the event measured; metrics of an evaluation together with its times."""
    flat = {key: value for key, value in event.data.items() if key not in BOOKKEEPING}
    if event.kind in (EventKind.VALIDATE, EventKind.TEST):
        flat = {**dict(flat.pop("metrics", {})), **flat}
    numbers = ((key, as_number(value)) for key, value in flat.items() if not isinstance(value, str))
    return {key: value for key, value in numbers if value is not None}
