"""The learning rate as a pure function of progress, so that resuming needs no state.

[Note: how lengths are counted]
A schedule counts in units: optimizer steps, or epochs with `by: epoch`, where the rate changes only between
epochs. Unit 0 is the first one. `total` and `milestones` are positions in the run, so the warm-up lies inside
them; `first` and `gamma` have no fixed place and count from the end of the warm-up. The warm-up starts at
`warmup_start_factor` in unit 0 and reaches the full rate at unit `warmup`, where the schedule proper begins.
A given `total` means what it means in torch: unit `total` is the first one at the end value. An absent one
means the end of the run: the run's last unit is at the end value. After its end a schedule stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from plait.config import (
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
from plait.errors import ConfigError, Problem
from plait.optim import curves, deepspeed_curves

Curve = Callable[[int], float]
"""From a unit to a rate, or to a momentum."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the learning rate, and momentum if that moves too, is at each optimizer step."""

    base_lr: float
    rate: Curve
    """Units to rates, for a group whose own rate is `base_lr`."""
    cycle: Curve | None = None
    """Units to momenta."""
    steps_per_unit: int = 1

    def lr(self, step: int) -> float:
        """The rate of the update number `step`, counted from zero."""
        return self.rate(step // self.steps_per_unit)

    def momentum(self, step: int) -> float | None:
        """The momentum (the first beta) of that update; None where the schedule leaves it alone."""
        return None if self.cycle is None else self.cycle(step // self.steps_per_unit)

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set the rates for the update number `step`: each group's `initial_lr`, scaled as the schedule says.

        Returns the rate of groups that keep to the base rate.
        """
        lr, base = self.rate(step // self.steps_per_unit), self.base_lr
        for group in optimizer.param_groups:
            initial = group.setdefault("initial_lr", group["lr"])
            wanted = lr if initial == base else initial * (lr / base)
            if group["lr"] != wanted:
                group["lr"] = wanted
        if self.cycle is not None:
            _set_momentum(optimizer, self.cycle(step // self.steps_per_unit))
        return lr


class OwnRates:
    """Rates that somebody else sets: those in the groups of the optimizer, as they are at each step."""

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Change nothing; returns the rate of the first group."""
        return float(optimizer.param_groups[0]["lr"])


def build_schedule(
    config: ScheduleConfig | None, *, base_lr: float, total_steps: int | None, steps_per_epoch: int | None
) -> Schedule:
    """The schedule that `config` describes; none is a constant rate.

    `total_steps` is the length of the run, where it is known. Raises ConfigError where the configuration
    needs it, or `steps_per_epoch`, and it is not.
    """
    if config is None:
        return Schedule(base_lr, lambda unit: base_lr)
    steps = 1
    if config.by == "epoch":
        if steps_per_epoch is None:
            raise _problem("by", "'epoch' needs to know how many steps an epoch has", "Use 'step'.")
        steps = steps_per_epoch
    run = None if total_steps is None else -(-total_steps // steps)
    cycle = None
    match config:
        case WarmupConfig():
            rate = deepspeed_curves.warmup(config, base_lr)
        case WarmupDecayConfig():
            rate = deepspeed_curves.warmup_decay(config, base_lr, _deepspeed_total(config, run))
        case WarmupCosineConfig():
            rate = deepspeed_curves.warmup_cosine(config, base_lr, _deepspeed_total(config, run))
        case OneCycleConfig():
            rate = deepspeed_curves.one_cycle(config)
            cycle = deepspeed_curves.one_cycle_momentum(config) if config.cycle_momentum else None
        case LRRangeTestConfig():
            rate = deepspeed_curves.range_test(config)
        case _:
            rate = _with_warmup(config, base_lr, run)
    return Schedule(base_lr, rate, cycle, steps)


_TorchConfig = (
    ConstantConfig
    | LinearConfig
    | CosineConfig
    | CosineRestartConfig
    | PolynomialConfig
    | MultiStepConfig
    | ExponentialConfig
)


def _with_warmup(config: _TorchConfig, base_lr: float, run: int | None) -> Curve:
    proper = _proper(config, run)
    warmup, start = config.warmup, config.warmup_start_factor
    if warmup == 0:
        return lambda unit: base_lr * proper(unit)
    if config.by == "epoch" and start == 0.0:
        raise _problem("warmup_start_factor", "0 with `by: epoch` is a whole epoch at rate zero", "Write, say, 0.1.")
    slope = (1.0 - start) / warmup
    return lambda unit: base_lr * (start + slope * unit if unit < warmup else proper(unit - warmup))


def _proper(config: _TorchConfig, run: int | None) -> Curve:
    match config:
        case ConstantConfig():
            # Without a total no length is needed: the factor stays.
            length = None if config.total is None else max(0, config.total - config.warmup)
            return curves.constant(config.factor, length)
        case LinearConfig():
            return curves.linear(config.start_factor, config.end_factor, _length(config, run))
        case CosineConfig():
            return curves.cosine(config.min_factor, _length(config, run))
        case PolynomialConfig():
            return curves.polynomial(config.power, config.min_factor, _length(config, run))
        case CosineRestartConfig():
            return curves.cosine_restarts(config.first, config.multiply, config.min_factor)
        case MultiStepConfig():
            if any(milestone < config.warmup for milestone in config.milestones):
                raise _problem(
                    "milestones",
                    f"{list(config.milestones)}: one lies in the warm-up of {config.warmup}",
                    "They count from the start of the run, the warm-up included.",
                )
            return curves.multi_step([m - config.warmup for m in config.milestones], config.gamma)
        case ExponentialConfig():
            return curves.exponential(config.gamma)


def _length(config: LinearConfig | CosineConfig | PolynomialConfig, run: int | None) -> int:
    """Units from the end of the warm-up to the first one at the end value."""
    if config.total is not None:
        if config.total <= config.warmup:
            raise _problem(
                "total",
                f"{config.total} is not longer than the warm-up of {config.warmup}, which it includes",
                "Make it longer, or leave it out: then it is the length of the run.",
            )
        return config.total - config.warmup
    if run is None:
        raise _no_length("total", config.type)
    return max(1, run - 1 - config.warmup)


def _deepspeed_total(config: WarmupDecayConfig | WarmupCosineConfig, run: int | None) -> int:
    if config.total_num_steps is not None:
        return config.total_num_steps
    if run is None:
        raise _no_length("total_num_steps", config.type)
    return run


def _no_length(key: str, kind: str) -> ConfigError:
    return _problem(
        key,
        f"{kind} goes to the end of the run, and the length of this run is not known",
        "Set it, or set `train.max_steps`.",
    )


def _problem(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"schedule.{key}", message, remedy))


def _set_momentum(optimizer: Optimizer, momentum: float) -> None:
    for group in optimizer.param_groups:
        if "betas" not in group and not group.get("momentum"):
            raise _problem(
                "cycle_momentum",
                f"{type(optimizer).__name__} runs without momentum here, so there is none to cycle",
                "Set `optim.momentum`, or `cycle_momentum: false`.",
            )
        if "momentum" in group and group["momentum"] != momentum:
            group["momentum"] = momentum
        if "betas" in group and group["betas"][0] != momentum:
            group["betas"] = (momentum, *group["betas"][1:])
