"""Two states, tensor by tensor, with one tensor of each in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint import PlaitSource, TensorEntry
from plait.config import PrecisionConfig
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
    def entries(self) -> Mapping[str, TensorEntry]:
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


class SavedState:
    """A run's tensors after a step, and at its start, in checkpoints."""

    def __init__(self, start: Path, now: Path) -> None:
        self.start, self.now = PlaitSource(start), PlaitSource(now)

    def close(self) -> None:
        """Let go of the files."""
        self.start.close()
        self.now.close()


def compare(expected: Moment, measured: Moment, names: Iterable[str], *, step: int) -> dict[str, Deviation]:
    """How far `found` is from `expected`, for each name in order, and for each that only one of them has.

    Parameters are compared by how far they moved since the start; all else by value.
    """
    ours, theirs = expected.now.entries, measured.now.entries
    deviations = {}
    for name in dict.fromkeys([*names, *theirs]):
        if name not in theirs or name not in ours:
            where = "the reference has it" if name in ours else "the reference has no such tensor"
            deviations[name] = Deviation(math.inf, 0.0, f"only one run has it: {where}")
        elif ours[name] != theirs[name]:
            text = " and ".join(f"{tuple(e.shape)} {e.dtype}" for e in (ours[name], theirs[name]))
            deviations[name] = Deviation(math.inf, 0.0, f"shapes or formats differ: {text}")
        else:
            moved = name in expected.start.entries and name in measured.start.entries and step > 0
            starts = (expected.start.read(name), measured.start.read(name)) if moved else None
            deviations[name] = deviation(expected.now.read(name), measured.now.read(name), starts)
    return deviations


def deviation(expected: Tensor, measured: Tensor, starts: tuple[Tensor, Tensor] | None = None) -> Deviation:
    """How far two tensors are apart, relative to the norm of `expected`; with `starts`, how far their movements are."""
    if not (expected.is_floating_point() or expected.is_complex()):
        unequal = int((expected != measured).sum())
        return Deviation(unequal / max(expected.numel(), 1), 0.0)
    flat = [tensor.reshape(-1) for tensor in (expected, measured, *(starts or ()))]
    trim = TRIMMED if starts is not None and expected.numel() >= LARGE else 0
    difference = size = value = 0.0
    largest = torch.zeros(0, dtype=torch.float64)
    for begin in range(0, expected.numel(), _CHUNK):
        a, b, *before = (values[begin : begin + _CHUNK].double() for values in flat)
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


# How far two runs of the same maths may lie apart. Imports no torch.
#
# [Note: where a tolerance comes from]
# Two layouts add the same numbers up in different order, so they round differently, and training carries every
# rounding on: an optimizer that divides by the size of a gradient turns a rounding of a tiny gradient into a step of
# full length. No fixed number is right for all tensors. So the tolerance is measured on the run itself. The reference
# runs twice; the second time each weight starts off by up to one rounding of the format that is computed in. How far
# the two end up apart, tensor by tensor and step by step, is what one rounding does to this model and these data.
# A strategy may differ from the reference by `margin` times that: 16 in fp32, where sums in another order are off by
# many roundings; 4 in 16-bit formats, which are summed in fp32 and rounded only between one layer and the next.
#
# Where next to nothing was measured there is a floor, `roundings` of the format: a sum of 4096 terms is off by about
# √4096 = 64 of its roundings; 4 in 16-bit formats, for the same reason. And what is stored is rounded at each step.


NOISE = 0.5
"""A tensor of which rounding alone changes so much is noise, and says nothing about a strategy."""
_EPSILON = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The format that decides how exact a run can be."""

    dtype: str
    epsilon: float
    """The step from 1 to the next number."""
    roundings: float
    """How many of them a result may be off in any case."""
    margin: float
    """How many times the measured effect of one rounding is allowed."""

    @property
    def floor(self) -> float:
        """What is allowed whatever was measured."""
        return self.roundings * self.epsilon

    def allowed(self, sensitivity: float, stored: float = 0.0) -> float:
        """The tolerance of a quantity that one rounding of the weights moves by `sensitivity`.

        `stored` is what rounding it for storage does, relative to the same size. Infinite for noise; see
        [Note: where a tolerance comes from].
        """
        measured = self.margin * sensitivity
        if not measured < NOISE:
            return math.inf
        return max(self.floor, measured) + stored

    def explain(self) -> str:
        """Where the tolerance comes from, for people."""
        return (
            f"{self.margin:g} times what one rounding of the weights ({self.dtype}, {self.epsilon:.1e}) changes in the "
            f"reference itself, measured for each tensor and step; at least {self.roundings:g} roundings "
            f"({self.floor:.1e})"
        )


def rounding_of(precision: PrecisionConfig, *, on_cpu: bool) -> Rounding:
    """The coarser of the formats of compute and reduction."""
    compute = "fp32" if on_cpu and precision.compute == "tf32" else precision.compute
    dtype = max((compute, precision.reduce), key=lambda name: _EPSILON[name])
    return Rounding(dtype, _EPSILON[dtype], *((64.0, 16.0) if dtype == "fp32" else (4.0, 4.0)))
