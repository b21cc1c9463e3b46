"""Loss scaling behaves as DeepSpeed's, step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.config.precision import ScalerConfig
from plait.precision import LossScaler


def scales(overflows: str, **settings: Any) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` a clean step."""
    scaler = LossScaler(ScalerConfig(**settings))
    found = []
    for step in overflows:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("power", [0, 5, 16, 32])
def test_the_first_scale_is_two_to_the_power(power: int) -> None:
    assert LossScaler(ScalerConfig(initial_power=power)).scale == 2.0**power


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # An overflow halves at once where nothing is tolerated.
        ({"initial_power": 4, "hysteresis": 1}, "xx.x", [8, 4, 4, 2]),
        # Two are tolerated as one: the first uses up the patience, the second halves, and so does every later one.
        ({"initial_power": 4, "hysteresis": 2}, "xxx", [16, 8, 4]),
        ({"initial_power": 4, "hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
        # Clean steps between overflows do not restore the patience…
        ({"initial_power": 4, "hysteresis": 2}, "x..x.x", [16, 16, 16, 8, 8, 4]),
        # …unless they are asked to.
        ({"initial_power": 4, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
        # A window of clean steps doubles, and restores the patience.
        ({"initial_power": 2, "window": 3, "hysteresis": 2}, "......", [4, 4, 8, 8, 8, 16]),
        ({"initial_power": 2, "window": 2, "hysteresis": 2}, "x..xx", [4, 4, 8, 8, 4]),
        # An overflow starts the window anew, tolerated or not.
        ({"initial_power": 2, "window": 3, "hysteresis": 2}, "..x..x...", [4, 4, 4, 4, 4, 2, 2, 2, 4]),
        # The minimum holds.
        ({"initial_power": 2, "hysteresis": 1, "minimum": 2.0}, "xxx", [2, 2, 2]),
        ({"initial_power": 0, "hysteresis": 1, "minimum": 0.25}, "xxxx", [0.5, 0.25, 0.25, 0.25]),
        # A static scale never moves.
        ({"static": 128.0}, "xxx....", [128.0] * 7),
    ],
)
def test_the_scale_follows_the_table(settings: dict[str, Any], steps: str, expected: list[float]) -> None:
    assert scales(steps, **settings) == expected


class Reference:
    """The rule as DeepSpeed words it: iteration numbers, not counters."""

    def __init__(self, config: ScalerConfig) -> None:
        self.config, self.scale, self.patience = config, 2.0**config.initial_power, config.hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.config.hysteresis == 1 or self.patience == 1:
                self.scale = max(self.scale / 2, self.config.minimum)
            else:
                self.patience -= 1
            self.last_overflow = self.iteration
        else:
            if self.config.consecutive_hysteresis:
                self.patience = self.config.hysteresis
            if (self.iteration - self.last_overflow) % self.config.window == 0:
                self.patience = self.config.hysteresis
                self.scale *= 2
        self.iteration += 1


def test_any_history_gives_what_deepspeeds_rule_gives() -> None:
    for _ in range(200):
        config = ScalerConfig(
            initial_power=random.randint(0, 20),
            window=random.randint(1, 5),
            hysteresis=random.randint(1, 4),
            consecutive_hysteresis=random.random() < 0.5,
            minimum=random.choice([0.5, 1.0, 8.0]),
        )
        ours, reference = LossScaler(config), Reference(config)
        for _ in range(60):
            overflow = random.random() < 0.3
            ours.update(overflow=overflow)
            reference.update(overflow)
            assert ours.scale == reference.scale, config


def test_a_scaler_goes_on_from_its_state() -> None:
    config = ScalerConfig(initial_power=8, window=3, hysteresis=3)
    history = random.choices("x.", k=40)
    for cut in (1, 7, 20):
        first, second = LossScaler(config), LossScaler(config)
        for step in history[:cut]:
            first.update(overflow=step == "x")
        second.restore(first.state())
        for step in history[cut:]:
            first.update(overflow=step == "x")
            second.update(overflow=step == "x")
        assert first.state() == second.state()


def test_only_a_scale_that_cannot_shrink_is_at_its_minimum() -> None:
    scaler = LossScaler(ScalerConfig(initial_power=1, hysteresis=1))
    assert not scaler.at_minimum
    scaler.update(overflow=True)
    assert scaler.at_minimum
    assert LossScaler(ScalerConfig(static=2.0**15)).at_minimum
