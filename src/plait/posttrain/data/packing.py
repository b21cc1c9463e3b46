"""Several examples in one row, none of them cut."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of indices whose lengths add up to no more than `room`: the longest first, each where it fits best.

    A function of the lengths alone. Rows are given in the order of their first example.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """(space left, row), sorted."""
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[index]
        assert 0 < length <= room, "examples that do not fit were left out before"
        at = bisect_left(free, (length, -1))
        if at == len(free):
            rows.append([index])
            insort(free, (room - length, len(rows) - 1))
        else:
            space, row = free.pop(at)
            rows[row].append(index)
            insort(free, (space - length, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
