"""Learning rates by step: against torch's schedulers, and against tables taken from DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.refusals import refused
from torch.optim import lr_scheduler

from plait.config.schedule import (
    ConstantConfig,
    CosineConfig,
    CosineRestartConfig,
    ExponentialConfig,
    LinearConfig,
    LRRangeTestConfig,
    MultiStepConfig,
    OneCycleConfig,
    PolynomialConfig,
    ScheduleConfig,
    WarmupConfig,
    WarmupCosineConfig,
    WarmupDecayConfig,
)
from plait.errors import ConfigError
from plait.optim import Schedule, build_schedule

BASE = 0.5


def build(config: ScheduleConfig | None, total: int | None = None, epoch: int | None = None) -> Schedule:
    return build_schedule(config, base_lr=BASE, total_steps=total, steps_per_epoch=epoch)


def rates(config: ScheduleConfig | None, steps: int, total: int | None = None) -> list[float]:
    schedule = build(config, total)
    return [schedule.lr(step) for step in range(steps)]


def sgd(lr: float = BASE, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, **options)


TorchFactory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
AS_TORCH: list[tuple[ScheduleConfig, TorchFactory]] = [
    (ConstantConfig(factor=0.3, total=4), lambda o: lr_scheduler.ConstantLR(o, 0.3, 4)),
    (
        LinearConfig(start_factor=0.2, end_factor=0.9, total=7),
        lambda o: lr_scheduler.LinearLR(o, 0.2, 0.9, total_iters=7),
    ),
    (
        CosineConfig(min_factor=0.1, total=20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.1 * BASE),
    ),
    (
        CosineRestartConfig(first=4, multiply=2, min_factor=0.1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, eta_min=0.1 * BASE),
    ),
    (CosineRestartConfig(first=5), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
    (PolynomialConfig(power=2.0, total=9), lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0)),
    (MultiStepConfig(milestones=(3, 8), gamma=0.1), lambda o: lr_scheduler.MultiStepLR(o, [3, 8], 0.1)),
    (ExponentialConfig(gamma=0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
]


@pytest.mark.parametrize(("config", "factory"), AS_TORCH, ids=lambda v: getattr(v, "type", ""))
def test_without_warmup_the_rates_are_those_of_torch(config: ScheduleConfig, factory: TorchFactory) -> None:
    optimizer = sgd()
    reference = factory(optimizer)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(config, 20) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_warmup_is_a_linear_schedule_before_the_schedule_proper() -> None:
    optimizer = sgd()
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4), lr_scheduler.PolynomialLR(optimizer, 8)]
    reference = lr_scheduler.SequentialLR(optimizer, parts, [4])
    expected = []
    for _ in range(14):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    config = PolynomialConfig(total=12, warmup=4, warmup_start_factor=0.25)
    assert rates(config, 14) == pytest.approx(expected)


DEEPSPEED: list[tuple[ScheduleConfig, list[float]]] = [
    (
        WarmupConfig(warmup_num_steps=4, warmup_min_lr=0.1),
        [0.1, 0.1, 0.3, 0.4169925, 0.5, 0.5, 0.5, 0.5],
    ),
    (
        WarmupConfig(warmup_num_steps=4, warmup_type="linear", warmup_max_lr=1.0),
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0],
    ),
    (
        WarmupDecayConfig(warmup_num_steps=3, total_num_steps=8, warmup_type="linear"),
        [0.0, 0.0, 0.1666667, 0.3333333, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
    ),
    (
        WarmupCosineConfig(
            warmup_num_steps=3,
            total_num_steps=8,
            warmup_type="linear",
            warmup_min_ratio=0.1,
            cos_min_ratio=0.2,
        ),
        [0.0, 0.05, 0.2, 0.35, 0.4618034, 0.3618034, 0.2381966, 0.1381966, 0.1, 0.1, 0.1],
    ),
    (
        WarmupCosineConfig(warmup_num_steps=4, total_num_steps=8),
        [0.0, 0.0, 0.25, 0.3962406, 0.5, 0.426784, 0.250025, 0.073266, 5e-05, 5e-05],
    ),
    (
        OneCycleConfig(
            cycle_min_lr=0.1,
            cycle_max_lr=0.5,
            cycle_first_step_size=4,
            cycle_second_step_size=2,
            decay_lr_rate=0.5,
            decay_step_size=2,
        ),
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.08, 0.0666667, 0.0571429, 0.05],
    ),
    (
        OneCycleConfig(cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=6, cycle_first_stair_count=2),
        [0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.5, 0.3, 0.3, 0.3, 0.1, 0.1, 0.1, 0.1],
    ),
    (
        LRRangeTestConfig(lr_range_test_min_lr=0.1, lr_range_test_step_size=2),
        [0.1, 0.15, 0.2, 0.25, 0.3, 0.35],
    ),
    (
        LRRangeTestConfig(lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_staircase=True),
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3],
    ),
]


@pytest.mark.parametrize(("config", "expected"), DEEPSPEED, ids=lambda v: getattr(v, "type", ""))
def test_deepspeed_schedules_give_each_update_the_rate_deepspeed_gives_it(
    config: ScheduleConfig, expected: list[float]
) -> None:
    assert rates(config, len(expected)) == pytest.approx(expected, abs=1e-7)


def test_one_cycle_moves_momentum_against_the_rate() -> None:
    config = OneCycleConfig(
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        cycle_momentum=True,
        decay_mom_rate=0.02,
        decay_step_size=2,
    )
    schedule = build(config)
    expected = [0.9, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.909, 0.918]
    assert [schedule.momentum(step) for step in range(9)] == pytest.approx(expected)
    assert build(config.model_copy(update={"cycle_momentum": False})).momentum(3) is None


ENDS: list[tuple[ScheduleConfig, float]] = [
    (LinearConfig(end_factor=0.2, warmup=3), 0.2),
    (CosineConfig(min_factor=0.1), 0.1),
    (CosineConfig(min_factor=0.1, warmup=5), 0.1),
    (PolynomialConfig(power=3.0, min_factor=0.3), 0.3),
]


@pytest.mark.parametrize(("config", "end"), ENDS)
def test_without_a_total_the_last_step_of_the_run_is_at_the_end_value(config: ScheduleConfig, end: float) -> None:
    run = rates(config, 30, total=20)
    assert run[19] == pytest.approx(end * BASE)
    assert run[18] > run[19]
    assert run[20:] == [run[19]] * 10


def test_a_run_shorter_than_its_warmup_just_rises() -> None:
    assert rates(CosineConfig(warmup=10), 4, total=4) == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_by_epoch_changes_only_between_epochs() -> None:
    schedule = build(MultiStepConfig(by="epoch", milestones=(1, 3)), epoch=4)
    assert [schedule.lr(step) for step in range(16)] == pytest.approx([BASE] * 4 + [BASE * 0.1] * 8 + [BASE * 0.01] * 4)


def test_by_epoch_to_the_end_of_the_run_gives_the_last_epoch_the_end_value() -> None:
    schedule = build(LinearConfig(by="epoch", end_factor=0.0), total=11, epoch=4)
    assert [schedule.lr(step) for step in (0, 3, 4, 8, 10)] == pytest.approx([0.5, 0.5, 0.25, 0.0, 0.0])


def test_no_schedule_is_a_constant_rate() -> None:
    assert rates(None, 3) == [BASE] * 3


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (CosineConfig(), "schedule.total"),
        (WarmupDecayConfig(), "schedule.total_num_steps"),
        (WarmupCosineConfig(), "schedule.total_num_steps"),
        (CosineConfig(by="epoch", total=3), "schedule.by"),
        (LinearConfig(total=5, warmup=5), "schedule.total"),
        (MultiStepConfig(milestones=(3, 9), warmup=4), "schedule.milestones"),
    ],
)
def test_what_cannot_be_known_or_agree_is_an_error_naming_the_key(config: ScheduleConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert [problem.path for problem in caught.value.problems] == [key]


def test_a_first_epoch_at_rate_zero_is_refused() -> None:
    with refused(ConfigError, "`by: epoch`", key="schedule.warmup_start_factor"):
        build(CosineConfig(by="epoch", warmup=2), total=40, epoch=10)
    build(CosineConfig(by="epoch", warmup=2, warmup_start_factor=0.1), total=40, epoch=10)


def test_applying_scales_each_group_from_its_own_initial_rate() -> None:
    params = [{"params": [torch.zeros(1)], "lr": lr, "initial_lr": lr} for lr in (BASE, 0.01)]
    optimizer = torch.optim.SGD(params)
    schedule = build(LinearConfig(total=10))
    for step in (0, 4, 7, 4):
        schedule.apply(optimizer, step)
        scale = 1 - step / 10
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([BASE * scale, 0.01 * scale])
    assert optimizer.param_groups[0]["lr"] == schedule.lr(4)


def test_applying_sets_momentum_where_the_optimizer_keeps_it() -> None:
    schedule = build(OneCycleConfig(cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4, cycle_momentum=True))
    with_momentum = sgd(momentum=0.5)
    schedule.apply(with_momentum, 2)
    assert with_momentum.param_groups[0]["momentum"] == pytest.approx(0.85)
    adam = torch.optim.AdamW([torch.zeros(1)], betas=(0.9, 0.95))
    schedule.apply(adam, 2)
    assert adam.param_groups[0]["betas"] == pytest.approx((0.85, 0.95))


def test_cycling_a_momentum_that_is_not_there_is_an_error() -> None:
    config = OneCycleConfig(cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_momentum=True)
    with refused(ConfigError, "SGD", "`optim.momentum`", key="schedule.cycle_momentum"):
        build(config).apply(sgd(), 0)
