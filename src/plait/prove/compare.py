"""Compare two saved states, one tensor of each in memory at a time; the tolerances of the comparison."""

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
Optimizers like Adam divide by the size of a gradient, so the size of a step does not depend on it. If a gradient is as
small as its rounding error, the sign of the step is random. A large matrix always has a few such entries, other ones in
each run. So the `TRIMMED` largest entries of a parameter's difference are ignored if it has `LARGE` entries or more.
A real error in such an entry is found in the optimizer state, where no entry is ignored.
"""
LARGE = 1024
_CHUNK = 1 << 24
"""Elements that are compared at once."""


class NamedTensors(Protocol):
    """Tensors by name, which are read one after another."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Name → shape and dtype."""

    def read(self, name: str) -> Tensor:
        """Return one tensor, unsharded."""


class RunState(Protocol):
    """The tensors of a run after a step, and at its start."""

    @property
    def start(self) -> NamedTensors:
        """The tensors before the first step."""

    @property
    def now(self) -> NamedTensors:
        """The tensors after this step."""


class SavedState:
    """The tensors of a run after a step, and at its start, read from checkpoints."""

    def __init__(self, start: Path, now: Path) -> None:
        self.start, self.now = PlaitSource(start), PlaitSource(now)

    def close(self) -> None:
        """Close the files."""
        self.start.close()
        self.now.close()


def compare(expected: RunState, measured: RunState, names: Iterable[str], *, step: int) -> dict[str, Deviation]:
    """Return the deviation of `measured` from `expected` for each name, and for names that only one of them has.

    Parameters are compared by their change since the start; everything else by value.
    """
    ours, theirs = expected.now.entries, measured.now.entries
    deviations = {}
    for name in dict.fromkeys([*names, *theirs]):
        if name not in theirs or name not in ours:
            where = "the reference" if name in ours else "the candidate"
            deviations[name] = Deviation(math.inf, 0.0, f"only {where} has this tensor")
        elif ours[name] != theirs[name]:
            text = " and ".join(f"{tuple(e.shape)} {e.dtype}" for e in (ours[name], theirs[name]))
            deviations[name] = Deviation(math.inf, 0.0, f"shapes or dtypes differ: {text}")
        else:
            moved = name in expected.start.entries and name in measured.start.entries and step > 0
            starts = (expected.start.read(name), measured.start.read(name)) if moved else None
            deviations[name] = deviation(expected.now.read(name), measured.now.read(name), starts)
    return deviations


def deviation(expected: Tensor, measured: Tensor, starts: tuple[Tensor, Tensor] | None = None) -> Deviation:
    """Return the deviation of a tensor relative to the norm of `expected`; with `starts`, that of the changes."""
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
            return Deviation(math.inf, 0.0, "not finite in one of the runs")
        gap = (b - a).nan_to_num_(0.0, 0.0, 0.0).square()
        difference += float(gap.sum())
        size += float(a.nan_to_num(0.0, 0.0, 0.0).square().sum())
        if trim:
            largest = torch.cat((largest, gap)).topk(trim).values
    # If the reference did not change, the deviation is relative to the norm of its value.
    scale = math.sqrt(size) or math.sqrt(value) or 1.0
    left = math.sqrt(max(difference - float(largest.sum()), 0.0))
    return Deviation(left / scale, torch.finfo(expected.dtype).eps * math.sqrt(value) / scale)


# The tolerance for differences between two runs that compute the same.
#
# [Note: where a tolerance comes from]
# Two layouts sum the same numbers in a different order, so they round differently, and training amplifies rounding: an
# optimizer that divides by the size of a gradient turns the rounding of a tiny gradient into a step of full length. No
# fixed tolerance is right for all tensors. So it is measured on the run itself. The reference runs twice; in the second
# run each initial weight is perturbed by up to one rounding of the compute dtype. The difference between the two runs,
# for each tensor and step, is the effect of one rounding on this model and these data. A strategy may differ from the
# reference by `margin` times that: 16 in fp32, where sums in another order differ by many roundings; 4 in 16-bit
# dtypes, which are summed in fp32 and rounded only between layers.
#
# Where the measured effect is tiny there is a floor of `roundings` of the dtype: a sum of 4096 terms is off by about
# √4096 = 64 of its roundings; 4 in 16-bit dtypes, for the same reason. And stored values are rounded at each step.


NOISE = 0.5
"""A tensor that rounding alone changes by this share is noise, and cannot be compared."""
_EPSILON = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The dtype that limits the accuracy of a run, and the tolerances that follow."""

    dtype: str
    epsilon: float
    """The machine epsilon."""
    roundings: float
    """The number of roundings, each of `epsilon`, by which any result may deviate."""
    margin: float
    """The allowed multiple of the measured effect of one rounding."""

    @property
    def floor(self) -> float:
        """The smallest tolerance of any quantity."""
        return self.roundings * self.epsilon

    def allowed(self, sensitivity: float, stored: float = 0.0) -> float:
        """Return the tolerance of a quantity that one rounding of the weights changes by `sensitivity`.

        `stored` is the effect of rounding it for storage, relative to the same norm. The tolerance of noise is
        infinite; see [Note: where a tolerance comes from].
        """
        measured = self.margin * sensitivity
        if not measured < NOISE:
            return math.inf
        return max(self.floor, measured) + stored

    def explain(self) -> str:
        """Return how the tolerance was determined, as text."""
        return (
            f"{self.margin:g} times the effect of one rounding of the weights ({self.dtype}, {self.epsilon:.1e}) on "
            f"the reference itself, measured for each tensor and step; at least {self.roundings:g} roundings "
            f"({self.floor:.1e})"
        )


def rounding_of(precision: PrecisionConfig, *, on_cpu: bool) -> Rounding:
    """Return the rounding of the coarser of the compute and reduction dtypes."""
    compute = "fp32" if on_cpu and precision.compute == "tf32" else precision.compute
    dtype = max((compute, precision.reduce), key=lambda name: _EPSILON[name])
    return Rounding(dtype, _EPSILON[dtype], *((64.0, 16.0) if dtype == "fp32" else (4.0, 4.0)))
