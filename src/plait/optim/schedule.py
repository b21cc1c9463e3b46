"""The learning rate as a function of the step number, so that resuming a run needs no scheduler state.

[Note: how lengths are counted]
A schedule counts in units: optimizer steps, or epochs with `by: epoch`, where the rate changes only between
epochs. Unit 0 is the first one. `total` and `milestones` count from the start of the run, so they include the warm-up;
`first` and `gamma` count from the end of the warm-up. The warm-up starts with the factor `warmup_start_factor` in unit
0 and reaches the full rate in unit `warmup`, where the schedule itself begins. A given `total` has the same meaning as
in torch: unit `total` is the first one with the end value. If it is absent, the run's last unit has the end value. From
then on the rate is constant.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from plait.config import (
    ConstantConfig,
    CosineConfig,
    CosineRestartConfig,
    CustomSchedule,
    ExponentialConfig,
    LinearConfig,
    MultiStepConfig,
    PolynomialConfig,
    ScheduleConfig,
    WSDConfig,
)
from plait.errors import ConfigError, Problem
from plait.plugins import build, call, load

Curve = Callable[[int], float]
"""A function from a unit (a step or an epoch) to a rate, a factor of it, or a momentum."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate, and the momentum if it is scheduled, of each optimizer step."""

    base_lr: float
    rate: Curve
    """The rate in each unit, of a parameter group whose initial rate is `base_lr`."""
    cycle: Curve | None = None
    """The momentum in each unit; None if it is not scheduled."""
    steps_per_unit: int = 1

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from zero."""
        return self.rate(step // self.steps_per_unit)

    def momentum(self, step: int) -> float | None:
        """Return the momentum (the first beta) of optimizer step `step`; None if it is not scheduled."""
        return None if self.cycle is None else self.cycle(step // self.steps_per_unit)

    @property
    def schedules_momentum(self) -> bool:
        """Whether momentum is scheduled, too."""
        return self.cycle is not None

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set each group's `lr` for optimizer step `step`: its `initial_lr`, scaled by the schedule.

        Returns the rate of groups whose `initial_lr` is `base_lr`.
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


@dataclass(frozen=True, slots=True)
class GroupSchedule(Schedule):
    """A schedule that sets the rate, and perhaps the momentum, of each group separately."""

    by_group: Callable[[int], list[dict[str, Any]]] = lambda unit: []

    @property
    def schedules_momentum(self) -> bool:
        """Always true: a torch scheduler may set momenta."""
        return True

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set each group's values for optimizer step `step`; return the rate of the first group."""
        settings = self.by_group(step // self.steps_per_unit)
        for group, wanted in zip(optimizer.param_groups, settings, strict=True):
            if wanted.get("momentum") and not group["momentum"]:
                _refuse_momentum(optimizer)
            group.update(wanted)
        return float(settings[0]["lr"])


class OptimizerRates:
    """No schedule: the learning rates in the optimizer's groups are not changed; the user's code may set them."""

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Return the rate of the first group; change nothing."""
        return float(optimizer.param_groups[0]["lr"])


class Curves(NamedTuple):
    """The scheduled values by unit."""

    rate: Curve
    """The rate in each unit, of a parameter group with the base rate."""
    cycle: Curve | None = None
    """The momentum in each unit; None if it is not scheduled."""


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """The base rate and the length of the run, from which a schedule is built, together with its section."""

    base_lr: float
    units: int | None
    """The length of the run in units; None if it is not known."""


def build_schedule(
    config: ScheduleConfig | None,
    *,
    base_lr: float,
    total_steps: int | None,
    steps_per_epoch: int | None,
    optimizer: Optimizer | None = None,
) -> Schedule:
    """Return the schedule that `config` describes; without one, a constant rate.

    `total_steps` is the length of the run. Raises `ConfigError` if the schedule needs it, or `steps_per_epoch`, and it
    is None. `optimizer` has the parameter groups from which a torch scheduler reads rates and momenta.
    """
    if config is None:
        return Schedule(base_lr, lambda unit: base_lr)
    steps = 1
    if config.by == "epoch":
        if steps_per_epoch is None:
            raise _problem("by", "'epoch' needs to know how many steps an epoch has", "Use 'step'.")
        steps = steps_per_epoch
    run = None if total_steps is None else -(-total_steps // steps)
    if isinstance(config, CustomSchedule):
        return build_custom_schedule(config, ScheduleSpan(base_lr, run), optimizer, steps)
    curves: Curves = build(config, "schedule", ScheduleSpan(base_lr, run))
    return Schedule(base_lr, curves.rate, curves.cycle, steps)


def constant(span: ScheduleSpan, config: ConstantConfig) -> Curves:
    """Return the curve of `ConstantLR`: `factor` for `total` units, then 1; without `total`, `factor` to the end."""
    factor, length = config.factor, None if config.total is None else max(0, config.total - config.warmup)
    return _after_warmup(span, config, lambda unit: factor if length is None or unit < length else 1.0)


def linear(span: ScheduleSpan, config: LinearConfig) -> Curves:
    """Return the curve of `LinearLR`: a straight line from `start_factor` to `end_factor`."""
    start, end, length = config.start_factor, config.end_factor, _length(config, span.units)
    slope = (end - start) / length
    return _after_warmup(span, config, lambda unit: start + slope * unit if unit < length else end)


def cosine(span: ScheduleSpan, config: CosineConfig) -> Curves:
    """Return the curve of `CosineAnnealingLR`: half a cosine period from 1 to `min_factor`."""
    end, length = config.min_factor, _length(config, span.units)
    pace, half = math.pi / length, (1.0 - end) / 2.0
    return _after_warmup(
        span, config, lambda unit: end + half * (1.0 + math.cos(pace * unit)) if unit < length else end
    )


def polynomial(span: ScheduleSpan, config: PolynomialConfig) -> Curves:
    """Return the curve of `PolynomialLR`: from 1 to `min_factor` as (1 - t)^power, with t from 0 to 1."""
    power, end, length = config.power, config.min_factor, _length(config, span.units)
    drop = 1.0 - end
    return _after_warmup(
        span, config, lambda unit: end + drop * (1.0 - unit / length) ** power if unit < length else end
    )


def cosine_restart(span: ScheduleSpan, config: CosineRestartConfig) -> Curves:
    """Return the curve of `CosineAnnealingWarmRestarts`: half cosines that start at 1; the n-th has
    `first · multiply^n` units.
    """
    first, multiply, end = config.first, config.multiply, config.min_factor
    half = (1.0 - end) / 2.0

    def factor(unit: int) -> float:
        length = first
        if multiply == 1:
            unit %= length
        while unit >= length:
            unit -= length
            length *= multiply
        return end + half * (1.0 + math.cos(math.pi * unit / length))

    return _after_warmup(span, config, factor)


def multi_step(span: ScheduleSpan, config: MultiStepConfig) -> Curves:
    """Return the curve of `MultiStepLR`: the rate is multiplied by `gamma` at each milestone."""
    if any(milestone < config.warmup for milestone in config.milestones):
        raise _problem(
            "milestones",
            f"{list(config.milestones)}: one lies in the warm-up of {config.warmup}",
            "They count from the start of the run, the warm-up included.",
        )
    milestones = sorted(milestone - config.warmup for milestone in config.milestones)
    factors: list[float] = [config.gamma**count for count in range(len(milestones) + 1)]
    return _after_warmup(span, config, lambda unit: factors[bisect_right(milestones, unit)])


def exponential(span: ScheduleSpan, config: ExponentialConfig) -> Curves:
    """Return the curve of `ExponentialLR`: `gamma` to the power of the unit."""
    gamma = config.gamma
    return _after_warmup(span, config, lambda unit: gamma**unit)


def wsd(span: ScheduleSpan, config: WSDConfig) -> Curves:
    """Return the curve of WSD (warmup, stable, decay): 1 until `decay` units before the end, then to `min_factor`."""
    length, decay, end = _length(config, span.units), config.decay, config.min_factor
    if decay > length:
        raise _problem("decay", f"{decay} is longer than the {length} units behind the warm-up", "Make it shorter.")
    fall: Callable[[float], float] = {
        "linear": lambda share: share,
        "cosine": lambda share: (1.0 - math.cos(math.pi * share)) / 2.0,
        "sqrt": math.sqrt,
    }[config.shape]
    begin = length - decay

    def factor(unit: int) -> float:
        if unit <= begin:
            return 1.0
        return 1.0 - (1.0 - end) * fall((unit - begin) / decay) if unit < length else end

    return _after_warmup(span, config, factor)


_Warmed = (
    ConstantConfig
    | LinearConfig
    | CosineConfig
    | CosineRestartConfig
    | PolynomialConfig
    | MultiStepConfig
    | ExponentialConfig
    | WSDConfig
)


def _after_warmup(span: ScheduleSpan, config: _Warmed, factor: Curve) -> Curves:
    base_lr, warmup, start = span.base_lr, config.warmup, config.warmup_start_factor
    if warmup == 0:
        return Curves(lambda unit: base_lr * factor(unit))
    if config.by == "epoch" and start == 0.0:
        raise _problem("warmup_start_factor", "0 with `by: epoch` is a whole epoch at rate zero", "Write, say, 0.1.")
    slope = (1.0 - start) / warmup
    return Curves(lambda unit: base_lr * (start + slope * unit if unit < warmup else factor(unit - warmup)))


# ---- user-provided schedules


def build_custom_schedule(
    config: CustomSchedule, span: ScheduleSpan, optimizer: Optimizer | None, steps: int
) -> Schedule:
    """Return a user-provided schedule; raise `ConfigError` if `schedule.type` names nothing that can be one.

    [Note: what a schedule of one's own is] `schedule.type` may name one of three:

    - A function of the unit (step or epoch), counted from 0, that returns a factor; each group's initial rate is
      multiplied by it. If the function has a parameter `total_steps`, it receives the length of the run.
    - A class whose objects are such functions.
    - A scheduler class of torch, or a function with a parameter `optimizer` that builds a scheduler. The scheduler is
      stepped on a dummy optimizer that has the groups' rates, and the rates that it sets are read from there. So the
      rate is a function of the step here too, and no scheduler state needs to be saved.
    """
    target = load(config, "schedule")
    if isinstance(target, LRScheduler):
        name = type(target).__name__
        message = f"a {name} that is made already moves the rates of another optimizer"
        raise _problem("type", message, f"Give {name} itself with its arguments, or a function of `optimizer`.")
    if isinstance(target, type) and issubclass(target, ReduceLROnPlateau):
        message = "ReduceLROnPlateau follows what validation measures, and a rate here is a function of the step"
        raise _problem("type", message, "Use WSD, or go back from a plateau with another `optim.lr`.")
    if not callable(target):
        raise _problem(
            "type", f"{config.type!r} is a {type(target).__name__}, which cannot be called", "Name a function."
        )
    takes = _parameters(target)
    arguments = config.arguments
    if "total_steps" in takes and "total_steps" not in arguments:
        if span.units is not None:
            arguments["total_steps"] = span.units
        elif takes["total_steps"].default is inspect.Parameter.empty:
            raise _no_length("total_steps", str(config.type))
    if (isinstance(target, type) and issubclass(target, LRScheduler)) or "optimizer" in takes:
        stepped = _SteppedScheduler(target, config, arguments, span.base_lr, optimizer)
        return GroupSchedule(span.base_lr, lambda unit: stepped.at(unit)[0]["lr"], None, steps, stepped.at)
    factor = target
    if isinstance(target, type):
        factor = call(target, "schedule", name=str(config.type), arguments=arguments)
        arguments = {}

    call(factor, "schedule", 0, name=str(config.type), arguments=arguments)  # raises errors now, not in the first step

    def rate(unit: int) -> float:
        value = factor(unit, **arguments)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            message = f"{config.type!r} returned {value!r} for unit {unit}, which is not a factor of the learning rate"
            raise _problem("type", message, "Have it return a number that is not negative.")
        return span.base_lr * value

    rate(0)
    return Schedule(span.base_lr, rate, None, steps)


def _parameters(made: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


class _SteppedScheduler:
    """Steps a torch scheduler on a dummy optimizer, and records the settings of each group in each unit."""

    def __init__(
        self,
        made: Callable[..., Any],
        config: CustomSchedule,
        arguments: dict[str, Any],
        base_lr: float,
        optimizer: Optimizer | None,
    ) -> None:
        self._name = str(config.type)
        self._optimizer = _DummyOptimizer(base_lr, optimizer)
        self._scheduler = call(made, "schedule", self._optimizer, name=self._name, arguments=arguments)
        if not isinstance(self._scheduler, LRScheduler) or isinstance(self._scheduler, ReduceLROnPlateau):
            message = f"{self._name!r} made a {type(self._scheduler).__name__}, which moves no rate by the step alone"
            raise _problem("type", message, "Return a scheduler of torch.optim.lr_scheduler.")
        self._past = [self._optimizer.settings()]

    def at(self, unit: int) -> list[dict[str, Any]]:
        """Return the settings of every group in a unit."""
        while len(self._past) <= unit:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except Exception as error:  # for example beyond the scheduler's own length
                message = f"{self._name!r} has no rate for unit {len(self._past)}: {type(error).__name__}: {error}"
                raise _problem("type", message, "Give it the length of the run.") from error
            self._past.append(self._optimizer.settings())
        return self._past[unit]


class _DummyOptimizer(Optimizer):
    """A dummy optimizer: groups with the rates and momenta of another one, without parameters to update."""

    def __init__(self, base_lr: float, optimizer: Optimizer | None) -> None:
        groups: list[dict[str, Any]] = [{"initial_lr": base_lr}] if optimizer is None else optimizer.param_groups
        made = [
            {
                "params": [torch.zeros(1)],
                "lr": group["initial_lr"],
                **{key: group[key] for key in _SCHEDULED if key in group},
            }
            for group in groups
        ]
        super().__init__(made, {"lr": base_lr, **{key: made[0][key] for key in _SCHEDULED if key in made[0]}})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: there are no parameters to update."""

    def settings(self) -> list[dict[str, Any]]:
        """Return for every group the values that a scheduler may change."""
        return [{key: group[key] for key in ("lr", *_SCHEDULED) if key in group} for group in self.param_groups]


_SCHEDULED = ("momentum", "betas")


def _length(config: LinearConfig | CosineConfig | PolynomialConfig | WSDConfig, run: int | None) -> int:
    """Return the number of units from the end of the warm-up to the first unit with the end value."""
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


def _no_length(key: str, name: str) -> ConfigError:
    return _problem(
        key,
        f"{name} goes to the end of the run, and the length of this run is not known",
        "Set it, or set `train.max_steps`.",
    )


def _problem(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"schedule.{key}", message, remedy))


def _set_momentum(optimizer: Optimizer, momentum: float) -> None:
    for group in optimizer.param_groups:
        if "betas" not in group and not group.get("momentum"):
            _refuse_momentum(optimizer)
        if "momentum" in group and group["momentum"] != momentum:
            group["momentum"] = momentum
        if "betas" in group and group["betas"][0] != momentum:
            group["betas"] = (momentum, *group["betas"][1:])


def _refuse_momentum(optimizer: Optimizer) -> None:
    raise _problem(
        "cycle_momentum",
        f"{type(optimizer).__name__} runs without momentum here, so there is none to cycle",
        "Set `optim.momentum`, or `cycle_momentum: false`.",
    )
