"""DeepSpeed's schedules: the rate that a DeepSpeed 0.19 run uses in each update.

A run description uses DeepSpeed's names (`schedule: {type: WarmupLR}`); `builds` of each section's class refers to
the function here that builds it.

DeepSpeed steps a scheduler after each update, so iteration i of its formulas is the rate of update i + 1, and the first
update has the start value. Here `unit` is the update (or epoch) whose rate is computed; `_iteration` converts it to
DeepSpeed's iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.config import LRRangeTestConfig, OneCycleConfig, WarmupConfig, WarmupCosineConfig, WarmupDecayConfig
from plait.errors import ConfigError, Problem
from plait.optim import Curves, ScheduleSpan

Curve = Callable[[int], float]


def warmup(span: ScheduleSpan, config: WarmupConfig) -> Curves:
    """Return `WarmupLR`: from `warmup_min_lr` up to `warmup_max_lr`, then constant."""
    low, high = config.warmup_min_lr, _peak(config, span.base_lr)
    length, rise = _rise(config)
    return Curves(lambda unit: low + (high - low) * (rise(_iteration(unit)) if _iteration(unit) < length else 1.0))


def warmup_decay(span: ScheduleSpan, config: WarmupDecayConfig) -> Curves:
    """Return `WarmupDecayLR`: up to `warmup_max_lr`, then in a straight line down to `warmup_min_lr`."""
    low, high, total = config.warmup_min_lr, _peak(config, span.base_lr), _total(config, span)
    length, rise = _rise(config)
    fall = max(1, total - length)

    def rate(unit: int) -> float:
        iteration = _iteration(unit)
        gamma = rise(iteration) if iteration < length else max(0.0, (total - iteration) / fall)
        return low + (high - low) * gamma

    return Curves(rate)


def warmup_cosine(span: ScheduleSpan, config: WarmupCosineConfig) -> Curves:
    """Return `WarmupCosineLR`: from `warmup_min_ratio` of the base rate up to 1, then a cosine to `cos_min_ratio`.

    As in DeepSpeed, the very first update has rate zero, whatever `warmup_min_ratio` is.
    """
    low, end, total, base_lr = config.warmup_min_ratio, config.cos_min_ratio, _total(config, span), span.base_lr
    length, rise = _rise(config)
    fall = max(1, total - length)

    def rate(unit: int) -> float:
        if unit == 0:
            return 0.0
        iteration = _iteration(unit)
        if iteration < length:
            return base_lr * (low + (1.0 - low) * rise(iteration))
        progress = min(1.0, (iteration - length + 1) / fall)
        return base_lr * (end + (1.0 - end) * (1.0 + math.cos(math.pi * progress)) / 2.0)

    return Curves(rate)


def one_cycle(span: ScheduleSpan, config: OneCycleConfig) -> Curves:
    """Return `OneCycle`: from `cycle_min_lr` up to `cycle_max_lr` and back, then down by `decay_lr_rate`.

    With `cycle_momentum`, the momentum changes the other way: from `cycle_max_mom` down to `cycle_min_mom` and back,
    then up by `decay_mom_rate`. Two errors of DeepSpeed are not reproduced: its first update has `cycle_min_mom`, and
    it sets the second beta of any optimizer to 0.99.
    """
    total, height = _cycle(config)
    low, high = config.cycle_min_lr, config.cycle_max_lr
    low_momentum, high_momentum = config.cycle_min_mom, config.cycle_max_mom
    decay, momentum_decay = (
        rate / config.decay_step_size if config.decay_step_size else 0.0
        for rate in (config.decay_lr_rate, config.decay_mom_rate)
    )

    def rate(unit: int) -> float:
        if unit <= total:
            return low + (high - low) * height(unit)
        return low / (1.0 + decay * (unit - total))

    def momentum(unit: int) -> float:
        if unit <= total:
            return high_momentum - (high_momentum - low_momentum) * height(unit)
        return high_momentum * (1.0 + momentum_decay * (unit - total))

    return Curves(rate, momentum if config.cycle_momentum else None)


def range_test(span: ScheduleSpan, config: LRRangeTestConfig) -> Curves:
    """Return `LRRangeTest`: from `lr_range_test_min_lr` up, by `lr_range_test_step_rate` of it per step size."""
    low, size, pace = config.lr_range_test_min_lr, config.lr_range_test_step_size, config.lr_range_test_step_rate
    if config.lr_range_test_staircase:
        return Curves(lambda unit: low * (1.0 + pace * (unit // size)))
    return Curves(lambda unit: low * (1.0 + pace * (unit / size)))


def _iteration(unit: int) -> int:
    return max(0, unit - 1)


def _peak(config: WarmupConfig | WarmupDecayConfig, base_lr: float) -> float:
    return base_lr if config.warmup_max_lr is None else config.warmup_max_lr


def _total(config: WarmupDecayConfig | WarmupCosineConfig, span: ScheduleSpan) -> int:
    total = span.units if config.total_num_steps is None else config.total_num_steps
    if total is None:
        message = f"{config.type} goes to the end of the run, and the length of this run is not known"
        raise ConfigError(Problem("schedule.total_num_steps", message, "Set it, or set `train.max_steps`."))
    return total


def _rise(config: WarmupConfig | WarmupDecayConfig | WarmupCosineConfig) -> tuple[int, Curve]:
    """Return the length of the warm-up, and the function from its iterations to the fraction of the rise, 0 to 1."""
    length = max(2, config.warmup_num_steps)
    if config.warmup_type == "linear":
        return length, lambda iteration: iteration / length
    scale = 1.0 / math.log(length)
    return length, lambda iteration: scale * math.log(iteration + 1)


def _cycle(config: OneCycleConfig) -> tuple[int, Curve]:
    """Return the length of the cycle, and the function from its units to the height, 0 (minimum) to 1 (maximum)."""
    first, second = config.cycle_first_step_size, config.cycle_second_step_size
    second = first if second is None else second
    first_stairs, second_stairs = config.cycle_first_stair_count, config.cycle_second_stair_count
    second_stairs = first_stairs if second_stairs is None else second_stairs
    total = first + second

    def height(unit: int) -> float:
        done, length, stairs = (unit, first, first_stairs) if unit <= first else (total - unit, second, second_stairs)
        return math.floor(done * stairs / length) / stairs if stairs else done / length

    return total, height
