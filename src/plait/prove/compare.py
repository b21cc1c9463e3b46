"""Two states, tensor by tensor, with one tensor of each in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint import Entry, PlaitSource
from plait.prove.job import Deviation

TRIMMED = 4
"""[Note: entries that rounding decides]
Optimizers like Adam make steps of full length whatever the size of a gradient. Where a gradient is as small as its
rounding, the sign of the step is a matter of chance. In a large matrix there are always a few such entries, on one
side and not on the other. So of a parameter's difference the `TRIMMED` largest entries are left out, where it has
`LARGE` entries or more. Optimizer state shows an entry that is truly wrong: nothing is left out there.
"""
LARGE = 1024
_CHUNK = 1 << 24
"""Entries that are compared at once."""


class Tensors(Protocol):
    """Tensors by name, one of which is looked at after the other."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Shape and dtype of each."""

    def read(self, name: str) -> Tensor:
        """One of them, whole."""


class Moment(Protocol):
    """A run's tensors after a step, and at its start."""

    @property
    def start(self) -> Tensors:
        """Before the first step."""

    @property
    def now(self) -> Tensors:
        """After this one."""


class State:
    """A run's tensors after a step, and at its start, in checkpoints."""

    def __init__(self, start: Path, now: Path) -> None:
        self.start, self.now = PlaitSource(start), PlaitSource(now)

    def close(self) -> None:
        """Let go of the files."""
        self.start.close()
        self.now.close()


def compare(expected: Moment, found: Moment, names: Iterable[str], *, step: int) -> dict[str, Deviation]:
    """How far `found` is from `expected`, for each name in order, and for each that only one of them has.

    Parameters are compared by how far they moved since the start; all else by value.
    """
    ours, theirs = expected.now.entries, found.now.entries
    deviations = {}
    for name in dict.fromkeys([*names, *theirs]):
        if name not in theirs or name not in ours:
            where = "the reference has it" if name in ours else "the reference has no such tensor"
            deviations[name] = Deviation(math.inf, 0.0, f"only one run has it: {where}")
        elif ours[name] != theirs[name]:
            text = " and ".join(f"{tuple(e.shape)} {e.dtype}" for e in (ours[name], theirs[name]))
            deviations[name] = Deviation(math.inf, 0.0, f"shapes or formats differ: {text}")
        else:
            moved = name in expected.start.entries and name in found.start.entries and step > 0
            starts = (expected.start.read(name), found.start.read(name)) if moved else None
            deviations[name] = deviation(expected.now.read(name), found.now.read(name), starts)
    return deviations


def deviation(expected: Tensor, found: Tensor, starts: tuple[Tensor, Tensor] | None = None) -> Deviation:
    """How far two tensors are apart, relative to the norm of `expected`; with `starts`, how far their movements are."""
    if not (expected.is_floating_point() or expected.is_complex()):
        unequal = int((expected != found).sum())
        return Deviation(unequal / max(expected.numel(), 1), 0.0)
    flat = [tensor.reshape(-1) for tensor in (expected, found, *(starts or ()))]
    trim = TRIMMED if starts is not None and expected.numel() >= LARGE else 0
    difference = size = value = 0.0
    largest = torch.zeros(0, dtype=torch.float64)
    for begin in range(0, expected.numel(), _CHUNK):
        a, b, *before = (each[begin : begin + _CHUNK].double() for each in flat)
        value += float(a.square().sum())
        if before:
            a, b = a - before[0], b - before[1]
        if not torch.equal(a.isfinite(), b.isfinite()):
            return Deviation(math.inf, 0.0, "not finite in one run alone")
        gap = (b - a).nan_to_num_(0.0, 0.0, 0.0).square()
        difference += float(gap.sum())
        size += float(a.nan_to_num(0.0, 0.0, 0.0).square().sum())
        if trim:
            largest = torch.cat((largest, gap)).topk(trim).values
    # What does not move at all is measured by its own size.
    scale = math.sqrt(size) or math.sqrt(value) or 1.0
    left = math.sqrt(max(difference - float(largest.sum()), 0.0))
    return Deviation(left / scale, torch.finfo(expected.dtype).eps * math.sqrt(value) / scale)
