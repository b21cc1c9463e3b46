"""Schedules of learning rate and momentum, against their closed forms and against MMEngine's own."""

from __future__ import annotations

import importlib.util
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from tests.refusals import refused

from plait.errors import ConfigError
from plait.frontends.mmengine.registry import PARAM_SCHEDULERS

BASE = 0.4


def optimizer(kind: str = "SGD", groups: int = 1) -> torch.optim.Optimizer:
    params = [{"params": [torch.zeros(1, requires_grad=True)], "lr": BASE * (i + 1)} for i in range(groups)]
    return torch.optim.SGD(params, lr=BASE, momentum=0.9) if kind == "SGD" else torch.optim.AdamW(params, lr=BASE)


def walk(descriptions: list[dict[str, Any]], steps: int, made: torch.optim.Optimizer, build: Any) -> list[float]:
    schedulers = [build(dict(each), made) for each in descriptions]
    values = []
    for _ in range(steps):
        values.append(made.param_groups[-1]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    return values


def ours(description: dict[str, Any], made: torch.optim.Optimizer) -> Any:
    return PARAM_SCHEDULERS.build(description, default_args={"optimizer": made})


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ({"type": "ConstantLR", "factor": 0.5, "end": 4}, lambda s: 0.5 if s < 3 else 1.0),
        ({"type": "LinearLR", "start_factor": 0.25, "end": 5}, lambda s: min(1.0, 0.25 + 0.75 * s / 4)),
        ({"type": "ExponentialLR", "gamma": 0.7}, lambda s: 0.7**s),
        ({"type": "StepLR", "step_size": 3, "gamma": 0.5}, lambda s: 0.5 ** (s // 3)),
        ({"type": "MultiStepLR", "milestones": [2, 5]}, lambda s: 0.1 ** ((s >= 2) + (s >= 5))),
        ({"type": "PolyLR", "power": 2.0, "end": 11}, lambda s: (1 - min(s, 10) / 10) ** 2),
        (
            {"type": "CosineAnnealingLR", "T_max": 10, "end": 11},
            lambda s: (1 + math.cos(math.pi * min(s, 10) / 10)) / 2,
        ),
        (  # without T_max it takes `end - begin` steps, of which the last one is not made: the rate stays above 0
            {"type": "CosineAnnealingLR", "end": 11},
            lambda s: (1 + math.cos(math.pi * min(s, 10) / 11)) / 2,
        ),
        (
            {"type": "CosineAnnealingLR", "begin": 2, "end": 9},
            lambda s: (1 + math.cos(math.pi * min(max(s - 2, 0), 6) / 7)) / 2,
        ),
    ],
)
def test_a_schedule_follows_its_curve(description: dict[str, Any], expected: Any) -> None:
    found = walk([description], 12, optimizer(), ours)
    assert found == pytest.approx([BASE * expected(step) for step in range(12)], rel=1e-9, abs=1e-12)


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing() -> None:
    found = walk([{"type": "OneCycleLR", "eta_max": 1.0, "total_steps": 20, "pct_start": 0.25}], 20, optimizer(), ours)
    assert found[0] == pytest.approx(1 / 25)
    assert max(found) == pytest.approx(1.0)
    assert found.index(max(found)) == 4
    assert found[-1] == pytest.approx(1 / 25 / 1e4)


def test_a_schedule_of_epochs_becomes_one_of_iterations() -> None:
    kind: Any = PARAM_SCHEDULERS.get("MultiStepLR")
    made = optimizer()
    scheduler = kind.build_iter_from_epoch(made, milestones=[1, 2], gamma=0.5, end=3, epoch_length=4)
    assert not scheduler.by_epoch
    found = []
    for _ in range(12):
        found.append(made.param_groups[0]["lr"] / BASE)
        scheduler.step()
    assert found == [1.0] * 4 + [0.5] * 4 + [0.25] * 4


def test_momentum_is_the_first_beta_of_adam() -> None:
    made = optimizer("AdamW")
    walk([{"type": "LinearMomentum", "start_factor": 0.5, "end": 3}], 1, made, ours)
    assert made.param_groups[0]["betas"] == (pytest.approx(0.675), 0.999)


def test_a_schedule_goes_on_from_its_state() -> None:
    description = {"type": "CosineAnnealingLR", "T_max": 9, "eta_min": 0.1}
    whole = walk([description], 9, optimizer(), ours)
    first, second = optimizer(), optimizer()
    begun, later = ours(dict(description), first), ours(dict(description), second)
    for _ in range(4):
        begun.step()
    later.load_state_dict(begun.state_dict())
    second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
    found = []
    for _ in range(5):
        found.append(second.param_groups[0]["lr"])
        later.step()
    assert found == whole[4:]


def test_a_plateau_lowers_the_rate() -> None:
    made = optimizer()
    scheduler = ours({"type": "ReduceOnPlateauLR", "monitor": "acc", "rule": "greater", "patience": 1}, made)
    for value in (0.5, 0.6, 0.6, 0.6):
        scheduler.step()
        scheduler.step({"acc": value})
    assert made.param_groups[0]["lr"] == pytest.approx(BASE * 0.1)
    with refused(ConfigError, "'acc'", "loss", key="param_scheduler.monitor"):
        scheduler.step({"loss": 1.0})


@pytest.mark.parametrize(
    ("description", "key", "names"),
    [
        ({"type": "LinearLR", "begin": 5, "end": 5}, "param_scheduler.LinearLR.end", [5, "`begin`"]),
        ({"type": "LinearLR", "start_facter": 0.1}, "parameter scheduler.LinearLR.start_facter", ["`start_factor`"]),
        ({"type": "CosineLR"}, "parameter scheduler.type", ["'CosineLR'", "`Cosine"]),
        (
            {"type": "CosineAnnealingLR", "eta_min": 0.1, "eta_min_ratio": 0.1},
            "param_scheduler.eta_min",
            ["`eta_min_ratio`"],
        ),
        ({"type": "ConstantLR", "factor": 2.0}, "param_scheduler.ConstantLR.factor", [2.0]),
        ({"type": "LinearLR", "start_factor": 1.5}, "param_scheduler.LinearLR.start_factor", [1.5]),
        ({"type": "LinearLR", "end_factor": -0.5}, "param_scheduler.LinearLR.end_factor", [-0.5]),
        ({"type": "StepLR", "step_size": 2, "last_step": 3}, "param_scheduler.last_step", [3, "`initial_lr`"]),
        ({"type": "OneCycleLR", "total_steps": 30}, "param_scheduler.eta_max", [0.0]),
        ({"type": "OneCycleLR", "eta_max": 0.3, "total_steps": -5}, "param_scheduler.total_steps", [-5]),
        (
            {"type": "OneCycleLR", "eta_max": 0.3, "total_steps": 9, "pct_start": 2.0},
            "param_scheduler.OneCycleLR.pct_start",
            [2.0],
        ),
        ({"type": "OneCycleLR", "eta_max": [0.3, 0.2], "total_steps": 9}, "param_scheduler.eta_max", [2, 1]),
        (
            {"type": "OneCycleParamScheduler", "param_name": "momentum", "eta_max": 0.3, "total_steps": 9},
            "param_scheduler.param_name",
            ["'momentum'", "'lr'"],
        ),
        ({"type": "ReduceOnPlateauLR", "factor": 1.5}, "param_scheduler.factor", [1.5]),
        ({"type": "ReduceOnPlateauLR", "threshold": -1.0}, "param_scheduler.threshold", [-1.0]),
        ({"type": "ConstantLR", "param_name": "momentum"}, "parameter scheduler.ConstantLR.param_name", ["factor"]),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(description: dict[str, Any], key: str, names: list[object]) -> None:
    with refused(ConfigError, *names, key=key):
        ours(description, optimizer())


def test_one_cycle_ends_where_its_steps_do() -> None:
    with refused(ConfigError, 5, 7, key="param_scheduler.total_steps"):
        walk([{"type": "OneCycleLR", "eta_max": 0.3, "total_steps": 5}], 9, optimizer(), ours)


def test_a_plateau_of_a_negative_metric_counts_as_in_mmengine() -> None:
    made = optimizer()
    scheduler = ours({"type": "ReduceOnPlateauLR", "patience": 0}, made)
    for _ in range(5):  # -1 is below -1 times (1 - 1e-4), so it is a gain every time
        scheduler.step({"loss": -1.0})
    assert made.param_groups[0]["lr"] == BASE


WINDOWS: list[dict[str, Any]] = [{}, {"begin": 3}, {"end": 9}, {"begin": 2, "end": 11}]
"""Every schedule below is compared in each of these, by epochs, by iterations, and turned from one into the other."""

KINDS: dict[str, list[dict[str, Any]]] = {
    "Constant": [{}, {"factor": 0.5}],
    "Linear": [{}, {"start_factor": 0.1}, {"end_factor": 0.5}, {"start_factor": 0.9, "end_factor": 0.2}],
    "Exponential": [{"gamma": 0.9}],
    "Step": [{"step_size": 3}, {"step_size": 4, "gamma": 0.5}],
    "MultiStep": [{"milestones": [2, 5]}, {"milestones": [2, 2, 5], "gamma": 0.5}],
    "Poly": [{}, {"power": 0.9}, {"eta_min": 0.01}, {"eta_min": 0.01, "power": 2}],
    "CosineAnnealing": [
        {},
        {"T_max": 6},
        {"T_max": 1},
        {"eta_min": 0.01},
        {"eta_min_ratio": 0.1},
        {"T_max": 6, "eta_min": 0.01},
        {"T_max": 6, "eta_min_ratio": 0.1},
    ],
    "CosineRestart": [
        {"periods": [4, 9], "restart_weights": [1, 0.5], "eta_min": 0.01},
        {"periods": [4, 9], "restart_weights": [1, 0.5], "eta_min_ratio": 0.01},
        {"periods": [6], "eta_min": 0.0},
    ],
    "OneCycle": [
        {"eta_max": 0.3},
        {"eta_max": 0.3, "total_steps": 40},
        {"eta_max": [0.3, 0.5], "total_steps": 40},
        {"eta_max": 0.3, "total_steps": 40, "three_phase": True},
        {"eta_max": 0.3, "total_steps": 40, "pct_start": 0.1, "anneal_strategy": "linear"},
        {"eta_max": 0.3, "total_steps": 40, "div_factor": 5.0, "final_div_factor": 10.0},
    ],
    "ReduceOnPlateau": [
        {},
        {"patience": 1, "cooldown": 2},
        {"patience": 0, "factor": 0.5, "min_value": 0.1},
        {"patience": 0, "min_value": [0.1, 0.2]},
        {"patience": 1, "threshold": 0.1, "threshold_rule": "abs"},
        {"patience": 1, "rule": "greater", "monitor": "acc", "threshold": 0.1},
    ],
}
METRICS = [5.0, 4, 4, 4, 4, 3.9999, 3, 3, 3, 3, 3, 3, 3, -1, -1, -1]


def trace(registry: Any, description: dict[str, Any], epoch_length: int) -> list[list[float]]:
    """The rates and momenta of every step; with an epoch length, of a schedule that was turned into iterations."""
    made = optimizer(groups=2)
    if epoch_length:
        options = dict(description)
        kind = registry.get(options.pop("type"))
        scheduler = kind.build_iter_from_epoch(made, epoch_length=epoch_length, **options)
    else:
        scheduler = registry.build(dict(description), default_args={"optimizer": made})
    found = []
    for step in range(30):
        found.append([group[name] for group in made.param_groups for name in ("lr", "momentum")])
        scheduler.step()
        if getattr(scheduler, "need_val_args", False):
            scheduler.step({"loss": METRICS[min(step, 15)], "acc": step // 4})
    return found


@pytest.mark.skipif(importlib.util.find_spec("mmengine") is None, reason="needs mmengine")
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_step_by_step_those_of_mmengine(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mmengine.optim  # noqa: F401  # they register themselves
        from mmengine.registry import PARAM_SCHEDULERS as THEIRS

        once = kind in ("CosineRestart", "OneCycle", "ReduceOnPlateau")
        types: list[dict[str, Any]] = [{"type": f"{kind}LR"}, {"type": f"{kind}ParamScheduler", "param_name": "lr"}]
        if not once:
            types += [{"type": f"{kind}Momentum"}]
        modes: list[tuple[dict[str, Any], int]] = [({}, 0)]
        if kind != "ReduceOnPlateau":  # which is by epochs only
            modes += [({"by_epoch": False}, 0), ({}, 3)]
        for named, options, window, (mode, length) in itertools.product(types, KINDS[kind], WINDOWS, modes):
            description = {**named, **options, **window, **mode}
            expected = trace(THEIRS, description, length)
            found = trace(PARAM_SCHEDULERS, description, length)
            for step, (value, wanted) in enumerate(zip(found, expected, strict=True)):
                assert value == pytest.approx(wanted, rel=1e-9, abs=1e-12), (description, length, step)


@pytest.mark.skipif(importlib.util.find_spec("mmengine") is None, reason="needs mmengine")
def test_schedules_one_after_another_are_those_of_mmengine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mmengine.optim  # noqa: F401  # they register themselves
        from mmengine.registry import PARAM_SCHEDULERS as THEIRS

        def theirs(description: dict[str, Any], made: torch.optim.Optimizer) -> Any:
            return THEIRS.build(description, default_args={"optimizer": made})

        for cut, end in ((2, 12), (5, 17), (9, 25)):
            after = {"begin": cut, "end": end}
            cases: list[list[dict[str, Any]]] = [
                [{"type": "LinearLR", "end": cut}, {"type": "CosineAnnealingLR", "T_max": end - cut, **after}],
                [{"type": "LinearLR", "end": cut}, {"type": "CosineAnnealingLR", **after}],
                [{"type": "ConstantLR", "end": cut}, {"type": "PolyLR", "power": 0.9, "eta_min": 1e-4, **after}],
                [{"type": "MultiStepLR", "milestones": [cut, end]}, {"type": "ExponentialLR", "gamma": 0.9, **after}],
                [{"type": "StepLR", "step_size": cut, **after}, {"type": "LinearMomentum", "end": end}],
            ]
            for case in cases:
                expected = walk(case, 30, optimizer(groups=2), theirs)
                assert walk(case, 30, optimizer(groups=2), ours) == pytest.approx(expected, rel=1e-12, abs=1e-15), case
