from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from plait.monitor.svg import downsample, tick_label, ticks


@pytest.mark.parametrize("_", range(50))
def test_ticks_are_round_evenly_spaced_and_inside(_: int) -> None:
    low = random.uniform(-100, 100) * 10 ** random.randint(-6, 6)
    high = low + random.random() * 10 ** random.randint(-2, 6) + abs(low) * 1e-3
    found = ticks(low, high, 5)
    gaps = [b - a for a, b in pairwise(found)]
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in found)
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-3) if gaps else True


def test_ticks_of_nothing_are_one_number() -> None:
    assert ticks(3.0, 3.0, 5) == [3.0]


def test_thinning_keeps_the_extremes_and_the_order() -> None:
    points = [(step, random.gauss(0, 1)) for step in range(5000)]
    points[1234], points[4321] = (1234, 99.0), (4321, -99.0)
    found = downsample(points, 200)
    assert len(found) <= 220
    assert {(1234, 99.0), (4321, -99.0)} <= set(found)
    assert found == sorted(found)


def test_thinning_keeps_holes_out_and_short_curves_whole() -> None:
    assert downsample([(1, 2.0), (2, math.nan)], 10) == [(1, 2.0), (2, math.nan)]
    assert all(
        math.isfinite(value) for _, value in downsample([(s, math.nan if s % 2 else 1.0) for s in range(100)], 10)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5, "2.5"), (20_000, "20k"), (1_500_000, "1.5M"), (3e-4, "3e-4"), (2.5e-5, "2.5e-5")],
)
def test_tick_numbers_are_short(value: float, text: str) -> None:
    assert tick_label(value) == text
