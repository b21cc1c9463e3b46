"""Two-column tables: what a run will use, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """A heading and its (label, value) rows."""

    title: str
    rows: tuple[tuple[str, str], ...]


def tables(data: Mapping[str, Any]) -> tuple[Table, ...]:
    """The tables in a RUN_START: the event's own title and rows, and every section that has the same two keys."""
    return tuple(_find(data))


def _find(data: Mapping[str, Any]) -> Iterator[Table]:
    if "rows" in data:
        yield Table(str(data.get("title", "")), pairs(data["rows"]))
    for value in data.values():
        if isinstance(value, Mapping):
            yield from _find(value)


def pairs(rows: Sequence[Sequence[Any]]) -> tuple[tuple[str, str], ...]:
    """Rows as text, whether they come from Python (tuples) or from a file (lists)."""
    return tuple((str(label), str(value)) for label, value in rows)


def plain(table: Table) -> str:
    """The table as aligned lines without any markup."""
    width = max((len(label) for label, _ in table.rows), default=0)
    indent = "\n" + " " * (width + 4)
    lines = [f"  {label:<{width}}  {value}".replace("\n", indent).rstrip() for label, value in table.rows]
    rule = "-" * max((len(line) for text in lines for line in text.splitlines()), default=0)
    return "\n".join([table.title, rule, *lines] if table.title else lines)
