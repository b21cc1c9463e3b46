"""Factors of the learning rate, by unit, as torch's schedulers of the same names give them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Factor = Callable[[int], float]


def constant(factor: float, length: int | None) -> Factor:
    """`factor` for `length` units, for ever if that is None; then 1."""
    if length is None:
        return lambda unit: factor
    return lambda unit: factor if unit < length else 1.0


def linear(start: float, end: float, length: int) -> Factor:
    """A straight line from `start` at unit 0 to `end` at unit `length`."""
    slope = (end - start) / length
    return lambda unit: start + slope * unit if unit < length else end


def cosine(end: float, length: int) -> Factor:
    """Half a cosine from 1 at unit 0 to `end` at unit `length`."""
    pace, half = math.pi / length, (1.0 - end) / 2.0
    return lambda unit: end + half * (1.0 + math.cos(pace * unit)) if unit < length else end


def polynomial(power: float, end: float, length: int) -> Factor:
    """From 1 at unit 0 to `end` at unit `length` along (1 - t)^power."""
    drop = 1.0 - end
    return lambda unit: end + drop * (1.0 - unit / length) ** power if unit < length else end


def cosine_restarts(first: int, multiply: int, end: float) -> Factor:
    """Cosines from 1 towards `end`; the n-th is `first · multiply^n` units long and starts at 1 again."""
    half = (1.0 - end) / 2.0

    def factor(unit: int) -> float:
        length = first
        if multiply == 1:
            unit %= length
        while unit >= length:
            unit -= length
            length *= multiply
        return end + half * (1.0 + math.cos(math.pi * unit / length))

    return factor


def multi_step(milestones: Sequence[int], gamma: float) -> Factor:
    """Multiplied by `gamma` from each milestone on."""
    places = sorted(milestones)
    factors: list[float] = [gamma**count for count in range(len(places) + 1)]
    return lambda unit: factors[bisect_right(places, unit)]


def exponential(gamma: float) -> Factor:
    """`gamma` to the power of the unit."""
    return lambda unit: gamma**unit


def stable_decay(length: int, decay: int, shape: str, end: float) -> Factor:
    """1 until `decay` units before unit `length`, where it has come down to `end`."""
    fall: Callable[[float], float] = {
        "linear": lambda share: share,
        "cosine": lambda share: (1.0 - math.cos(math.pi * share)) / 2.0,
        "sqrt": math.sqrt,
    }[shape]
    begin = length - decay

    def factor(unit: int) -> float:
        if unit <= begin:
            return 1.0
        return 1.0 - (1.0 - end) * fall((unit - begin) / decay) if unit < length else end

    return factor
