"""Where a checkpoint and a model do not agree: all of it, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from plait.checkpoint.index import Index

_SHOWN = 16
"""Rows of the table: the whole message has to fit on a screen."""


class Misfit(NamedTuple):
    """A tensor's name, its shape in the checkpoint and its shape in the model; `-` where there is none."""

    name: str
    there: str
    here: str


def misfits(index: Index, shapes: Mapping[str, tuple[int, ...]], ignore: Iterable[str] = ()) -> list[Misfit]:
    """Every tensor that is on one side only or has two shapes; `shapes` are those of the model.

    Entries of the checkpoint whose names start with one of `ignore` may be left unread.
    """
    found = []
    starts = tuple(ignore)
    for name in sorted(shapes.keys() | index.tensors.keys()):
        here, there = shapes.get(name), index.tensors.get(name)
        if here is None and name.startswith(starts):
            continue
        ours = "-" if here is None else str(here)
        theirs = "-" if there is None else str(there.shape)
        if ours != theirs:
            found.append(Misfit(name, theirs, ours))
    return found


def table(rows: list[Misfit]) -> str:
    """The misfits, as lines of text."""
    # What the optimizer keeps follows the parameters: it is news only where they are right.
    rows = [row for row in rows if row.name.startswith("model.")] or rows
    shown = [Misfit("tensor", "in the checkpoint", "in the model"), *rows[:_SHOWN]]
    names, theirs = max(len(row.name) for row in shown), max(len(row.there) for row in shown)
    lines = [f"  {name:<{names}}  {there:<{theirs}}  {here}" for name, there, here in shown]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} more")
    return "\n".join(lines)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns (`model.head.*`) fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
