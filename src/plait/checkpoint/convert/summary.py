"""What is inside a checkpoint, short enough to read: layers that are alike are one row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from plait.checkpoint.convert.source import TensorEntry

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A whole component of a name that is a number."""


Numbers = tuple[int, ...]


class SummaryRow(NamedTuple):
    """One tensor, or several that differ in their numbers only."""

    name: str
    """`layers.{0..31}.attention.wq.weight` where they are several."""
    tensors: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Of all of them."""


class SummaryGroup(NamedTuple):
    """Everything under one first word: `model`, `optim`, `rng`, `hook`."""

    name: str
    tensors: int
    elements: int
    bytes: int


def rows(entries: Mapping[str, TensorEntry], *, every: bool = False) -> list[SummaryRow]:
    """The table, part by part in the order of the checkpoint: `every` tensor in its own row, or alike ones together.

    Together are: layers (`{0..31}`), the states of one parameter (`{exp_avg,exp_avg_sq}`), and all counts of an
    optimizer's steps (`*.step`).
    """
    order = list(dict.fromkeys(name.partition(".")[0] for name in entries))
    entries = dict(sorted(entries.items(), key=lambda item: order.index(item[0].partition(".")[0])))
    if every:
        return [_row(name, 1, entry) for name, entry in entries.items()]
    alike: dict[tuple[str, TensorEntry], dict[str, list[str]]] = {}
    for name, entry in entries.items():
        stem, key = _split(name, entry)
        alike.setdefault((_NUMBER.sub("{}", stem), entry), {}).setdefault(stem, []).append(key)
    found: list[SummaryRow] = []
    for (pattern, entry), stems in alike.items():
        for keys in dict.fromkeys(tuple(dict.fromkeys(each)) for each in stems.values()):
            same = [stem for stem, each in stems.items() if tuple(dict.fromkeys(each)) == keys]
            tail = "" if keys == ("",) else "." + (keys[0] if len(keys) == 1 else "{" + ",".join(keys) + "}")
            sizes = {_numbers(stem): len(stems[stem]) for stem in same}
            for numbers in _products(list(sizes)):
                name = _pattern(pattern, numbers) + tail
                found.append(_row(name, sum(sizes[each] for each in numbers), entry))
    return found


def _numbers(stem: str) -> Numbers:
    return tuple(int(number) for number in _NUMBER.findall(stem))


def _split(name: str, entry: TensorEntry) -> tuple[str, str]:
    """A parameter and the key of its state; of anything else, the name alone."""
    if not name.startswith("optim."):
        return name, ""
    stem, _, key = name.rpartition(".")
    return ("optim.*" if not entry.shape else stem), key


def parts(entries: Mapping[str, TensorEntry]) -> list[SummaryGroup]:
    """The total of each part."""
    found: dict[str, list[TensorEntry]] = {}
    for name, entry in entries.items():
        found.setdefault(name.partition(".")[0], []).append(entry)
    return [
        SummaryGroup(name, len(each), sum(e.shape.numel() for e in each), sum(e.bytes for e in each))
        for name, each in found.items()
    ]


def _row(name: str, tensors: int, entry: TensorEntry) -> SummaryRow:
    return SummaryRow(name, tensors, tuple(entry.shape), str(entry.dtype).removeprefix("torch."), entry.bytes * tensors)


def _products(found: list[Numbers]) -> Iterable[list[Numbers]]:
    """Groups in which every number of one place goes with every number of the next, so that ranges tell them all."""
    columns = [set(column) for column in zip(*found, strict=True)]
    if math.prod(len(column) for column in columns) == len(found):
        yield found
        return
    for place in range(len(columns)):
        # Numbers that go with the same others belong together.
        others: dict[int, set[Numbers]] = {}
        for numbers in found:
            others.setdefault(numbers[place], set()).add(numbers[:place] + numbers[place + 1 :])
        alike = dict.fromkeys(frozenset(each) for each in others.values())
        if len(alike) > 1:
            for company in alike:
                yield from _products([numbers for numbers in found if others[numbers[place]] == company])
            return


def _pattern(pattern: str, found: list[Numbers]) -> str:
    columns = iter([sorted(set(column)) for column in zip(*found, strict=True)])
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
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}{',' if len(run) == 2 else '..'}{run[-1]}" for run in runs]
    return "{" + ",".join(words) + "}"
