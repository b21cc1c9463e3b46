"""A short table of a checkpoint's contents: layers whose tensors have equal shapes share one row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from plait.checkpoint.convert.source import TensorEntry

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a name that is a number."""


Numbers = tuple[int, ...]


class SummaryRow(NamedTuple):
    """One tensor, or several whose names differ in their numbers only."""

    name: str
    """The tensor's name, or a pattern such as `layers.{0..31}.attention.wq.weight` for several."""
    tensors: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """The total size of all of them."""


class SummaryGroup(NamedTuple):
    """All tensors with the same first component: `model`, `optim`, `rng`, `hook`."""

    name: str
    tensors: int
    elements: int
    bytes: int


def summary_rows(entries: Mapping[str, TensorEntry], *, every: bool = False) -> list[SummaryRow]:
    """Return the rows of the table in the order of the checkpoint; with `every`, one row per tensor.

    Otherwise one row stands for: layers (`{0..31}`), the states of one parameter (`{exp_avg,exp_avg_sq}`), and all step
    counts of an optimizer (`*.step`).
    """
    order = list(dict.fromkeys(name.partition(".")[0] for name in entries))
    entries = dict(sorted(entries.items(), key=lambda item: order.index(item[0].partition(".")[0])))
    if every:
        return [_row(name, 1, entry) for name, entry in entries.items()]
    alike: dict[tuple[str, TensorEntry], dict[str, list[str]]] = {}
    for name, entry in entries.items():
        stem, key = _split(name, entry)
        alike.setdefault((_NUMBER.sub("{}", stem), entry), {}).setdefault(stem, []).append(key)
    result: list[SummaryRow] = []
    for (pattern, entry), stems in alike.items():
        for keys in dict.fromkeys(tuple(dict.fromkeys(keys_of_stem)) for keys_of_stem in stems.values()):
            same = [stem for stem, keys_of_stem in stems.items() if tuple(dict.fromkeys(keys_of_stem)) == keys]
            tail = "" if keys == ("",) else "." + (keys[0] if len(keys) == 1 else "{" + ",".join(keys) + "}")
            sizes = {_numbers(stem): len(stems[stem]) for stem in same}
            for numbers in _products(list(sizes)):
                name = _pattern(pattern, numbers) + tail
                result.append(_row(name, sum(sizes[keys_of_stem] for keys_of_stem in numbers), entry))
    return result


def _numbers(stem: str) -> Numbers:
    return tuple(int(number) for number in _NUMBER.findall(stem))


def _split(name: str, entry: TensorEntry) -> tuple[str, str]:
    """Split an optimizer's name into parameter and key; return any other name with an empty key."""
    if not name.startswith("optim."):
        return name, ""
    stem, _, key = name.rpartition(".")
    return ("optim.*" if not entry.shape else stem), key


def group_totals(entries: Mapping[str, TensorEntry]) -> list[SummaryGroup]:
    """Return the totals of each group."""
    groups: dict[str, list[TensorEntry]] = {}
    for name, entry in entries.items():
        groups.setdefault(name.partition(".")[0], []).append(entry)
    return [
        SummaryGroup(name, len(members), sum(e.shape.numel() for e in members), sum(e.bytes for e in members))
        for name, members in groups.items()
    ]


def _row(name: str, tensors: int, entry: TensorEntry) -> SummaryRow:
    return SummaryRow(name, tensors, tuple(entry.shape), str(entry.dtype).removeprefix("torch."), entry.bytes * tensors)


def _products(combinations: list[Numbers]) -> Iterable[list[Numbers]]:
    """Yield groups of the combinations, each a Cartesian product of its columns, so that one pattern describes it."""
    columns = [set(column) for column in zip(*combinations, strict=True)]
    if math.prod(len(column) for column in columns) == len(combinations):
        yield combinations
        return
    for column in range(len(columns)):
        # Values of one column that occur with the same values of the other columns form a group.
        others: dict[int, set[Numbers]] = {}
        for numbers in combinations:
            others.setdefault(numbers[column], set()).add(numbers[:column] + numbers[column + 1 :])
        alike = dict.fromkeys(frozenset(others_of) for others_of in others.values())
        if len(alike) > 1:
            for company in alike:
                yield from _products([numbers for numbers in combinations if others[numbers[column]] == company])
            return


def _pattern(pattern: str, combinations: list[Numbers]) -> str:
    columns = iter([sorted(set(column)) for column in zip(*combinations, strict=True)])
    return re.sub(r"\{\}", lambda _: _range(next(columns)), pattern)


def _range(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] + 1 == value:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}{',' if len(run) == 2 else '..'}{run[-1]}" for run in runs]
    return "{" + ",".join(texts) + "}"
