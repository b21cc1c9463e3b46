"""How far two runs of the same maths may lie apart. Imports no torch.

[Note: where a tolerance comes from]
Two layouts add the same numbers up in different order, so they round differently, and training carries every
rounding on: an optimizer that divides by the size of a gradient turns a rounding of a tiny gradient into a step of
full length. No fixed number is right for all tensors. So the tolerance is measured on the run itself. The reference
runs twice; the second time each weight starts off by up to one rounding of the format that is computed in. How far
the two end up apart, tensor by tensor and step by step, is what one rounding does to this model and these data.
A strategy may differ from the reference by `margin` times that: 16 in fp32, where sums in another order are off by
many roundings; 4 in 16-bit formats, which are summed in fp32 and rounded only between one layer and the next.

Where next to nothing was measured there is a floor, `roundings` of the format: a sum of 4096 terms is off by about
√4096 = 64 of its roundings; 4 in 16-bit formats, for the same reason. And what is stored is rounded at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.config import PrecisionConfig

NOISE = 0.5
"""A tensor of which rounding alone changes so much is noise, and says nothing about a strategy."""
_EPSILON = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The format that decides how exact a run can be."""

    word: str
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
            f"{self.margin:g} times what one rounding of the weights ({self.word}, {self.epsilon:.1e}) changes in the "
            f"reference itself, measured for each tensor and step; at least {self.roundings:g} roundings "
            f"({self.floor:.1e})"
        )


def rounding_of(precision: PrecisionConfig, *, on_cpu: bool) -> Rounding:
    """The coarser of the formats of compute and reduction."""
    compute = "fp32" if on_cpu and precision.compute == "tf32" else precision.compute
    word = max((compute, precision.reduce), key=lambda each: _EPSILON[each])
    return Rounding(word, _EPSILON[word], *((64.0, 16.0) if word == "fp32" else (4.0, 4.0)))
