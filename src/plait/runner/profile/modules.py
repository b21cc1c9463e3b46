"""Modules as a tree: time and arithmetic of each with its parts, repeated blocks folded into one row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.runner.profile.count import OUTSIDE, Flops

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(slots=True)
class ModuleRow:
    """One module, or all that differ in a number only, with everything inside of them. Of one step, on one rank."""

    name: str
    depth: int = 0
    """So many rows stand above it."""
    names: set[str] = field(default_factory=set)
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: Flops = field(default_factory=Flops)

    @property
    def ms(self) -> float:
        """Both directions."""
        return self.forward_ms + self.backward_ms

    @property
    def flops_per_s(self) -> float | None:
        """Where something was computed and timed."""
        return self.flops.total / self.ms * 1e3 if self.ms and self.flops.total else None


def folded(name: str) -> str:
    """`blocks.3.ffn` as `blocks.*.ffn`."""
    return _NUMBER.sub("*", name)


def module_rows(root: str, times: Mapping[str, Mapping[str, float]], flops: Mapping[str, Flops]) -> list[ModuleRow]:
    """The tree from its root, the longest first among those that share a parent."""
    rows: dict[str, ModuleRow] = {}
    for name in dict.fromkeys([*times, *flops]):
        spent, done = times.get(name, {}), flops.get(name, Flops())
        for each in _with_parents(name, root):
            row = rows.setdefault(folded(each), ModuleRow(folded(each)))
            row.names.add(each)
            row.forward_ms += spent.get("forward", 0.0)
            row.backward_ms += spent.get("backward", 0.0)
            row.flops.forward += done.forward
            row.flops.again += done.again
            row.flops.backward += done.backward
    for parent in [each for each in rows if f"{each}.*" in rows]:
        del rows[parent]  # a list of blocks is not called, and would say the same as the blocks
    for name, row in rows.items():
        row.depth = len(_parents(name, rows, root))
    return sorted(rows.values(), key=lambda row: _place(row, rows, root))


def _parents(name: str, rows: Mapping[str, ModuleRow], root: str) -> list[str]:
    """The rows above a row, from the root."""
    if name in (root, OUTSIDE):
        return []
    words = name.split(".")
    above = (".".join(words[:end]) for end in range(1, len(words)))
    return [*([root] if root in rows else []), *(each for each in above if each in rows)]


def _with_parents(name: str, root: str) -> list[str]:
    if name == OUTSIDE:
        return [OUTSIDE]
    if name == root:
        return [root]
    words = name.split(".")
    return [root, *(".".join(words[: end + 1]) for end in range(len(words)))]


def _place(row: ModuleRow, rows: Mapping[str, ModuleRow], root: str) -> tuple[tuple[float, float, str], ...]:
    """Where a row stands: below its parents, and behind longer ones."""
    found = [(float(row.name == OUTSIDE), 0.0, "")]
    for name in [*_parents(row.name, rows, root), row.name]:
        if name != root:
            found.append((-rows[name].ms, -float(rows[name].flops.total), name))
    return tuple(found)
