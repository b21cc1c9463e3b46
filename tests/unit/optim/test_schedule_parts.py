"""Schedules of one's own: functions of the step, torch's schedulers, and WSD."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from plait.config import parse_sections
from plait.errors import ConfigError
from plait.optim import Schedule, build_schedule

BASE = 0.5


def schedule(value: Any, total: int | None = 20, optimizer: Any = None) -> Schedule:
    config = parse_sections(schedule=value).config.schedule
    return build_schedule(config, base_lr=BASE, total_steps=total, steps_per_epoch=5, optimizer=optimizer)


def two_groups() -> torch.optim.Adam:
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    made = torch.optim.Adam([{"params": [one]}, {"params": [two], "lr": 0.1}], lr=BASE)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    return made


def falling(step: int, total_steps: int, end: float = 0.0) -> float:
    return max(end, 1.0 - step / total_steps)


class Stairs:
    """Its objects are schedules."""

    def __init__(self, height: float) -> None:
        self.height = height

    def __call__(self, step: int) -> float:
        return self.height ** (step // 2)


HERE = __name__


def test_a_function_gives_the_factor_and_a_class_makes_one() -> None:
    assert [schedule(lambda step: 0.5**step).lr(step) for step in (0, 1, 2)] == [0.5, 0.25, 0.125]
    assert schedule({"type": f"{HERE}:falling", "end": 0.3}).lr(10) == pytest.approx(BASE * 0.5)
    assert schedule({"type": f"{HERE}:falling", "end": 0.3}).lr(19) == pytest.approx(BASE * 0.3)
    assert schedule({"type": f"{HERE}:Stairs", "height": 0.1}).lr(3) == pytest.approx(BASE * 0.1)
    assert schedule({"type": f"{HERE}:Stairs", "height": 0.1, "by": "epoch"}).lr(14) == pytest.approx(BASE * 0.1)


def test_it_scales_each_groups_own_rate() -> None:
    optimizer = two_groups()
    assert schedule(lambda step: 0.5).apply(optimizer, 3) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, pytest.approx(0.05)]


@pytest.mark.parametrize(
    ("value", "make"),
    [
        (
            {"type": "OneCycleLR", "max_lr": [1.0, 0.2]},
            lambda o: lr_scheduler.OneCycleLR(o, [1.0, 0.2], total_steps=20),
        ),
        ({"type": "StepLR", "step_size": 3}, lambda o: lr_scheduler.StepLR(o, 3)),
        (
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
                [4],
            ),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
            ),
        ),
    ],
    ids=["OneCycleLR", "StepLR", "SequentialLR"],
)
def test_a_scheduler_of_torch_moves_what_it_moves_in_torch(value: Any, make: Any) -> None:
    theirs, ours = two_groups(), two_groups()
    stepped, found = make(theirs), schedule(value, optimizer=two_groups())
    expected = []
    for _ in range(20):
        expected.append([(group["lr"], group["betas"]) for group in theirs.param_groups])
        theirs.step()
        if len(expected) < 20:
            stepped.step()
    order = [7, 19, 0, *range(20)]  # a resume begins anywhere, and a rollback goes back
    for step in order:
        found.apply(ours, step)
        assert [(group["lr"], group["betas"]) for group in ours.param_groups] == expected[step], step


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.55), ("cosine", 0.55), ("sqrt", 1 - 0.9 * 0.5**0.5)])
def test_wsd_rises_stays_and_falls(shape: str, middle: float) -> None:
    found = schedule({"type": "WSD", "warmup": 4, "decay": 6, "shape": shape, "min_factor": 0.1})
    factors = [found.lr(step) / BASE for step in range(20)]
    assert factors[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert factors[4:14] == pytest.approx([1.0] * 10)
    assert factors[16] == pytest.approx(middle)
    assert factors[19] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(factors[13:]))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "ReduceLROnPlateau"}, "schedule.type"),
        ({"type": f"{HERE}:falling", "ends": 0.1}, "schedule.ends"),
        (lambda step: "fast", "schedule.type"),
        (lambda step: -1.0, "schedule.type"),
        (lambda: 1.0, "schedule"),
        ({"type": "WSD", "decay": 30}, "schedule.decay"),
        ({"type": "OneCycleLR"}, "schedule"),
        (lr_scheduler.StepLR(two_groups(), 3), "schedule.type"),
        ("CosineLR", "schedule"),
    ],
)
def test_what_is_no_schedule_is_refused_at_its_key(value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(value)
    assert caught.value.problems[0].path == path


def test_a_length_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule({"type": f"{HERE}:falling"}, total=None)
    assert caught.value.problems[0].path == "schedule.total_steps"


def test_a_scheduler_that_ends_before_the_run_says_so() -> None:
    found = schedule({"type": "OneCycleLR", "max_lr": 1.0, "total_steps": 5}, optimizer=two_groups())
    with pytest.raises(ConfigError) as caught:
        found.lr(9)
    assert caught.value.problems[0].path == "schedule.type"
