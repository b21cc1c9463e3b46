"""Parameter schedules: classes by name for the learning rate, and most of them for the momentum too."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self, TypeVar

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.registry import PARAM_SCHEDULERS

# The base class of schedules.
#
# A schedule computes each value from the current one, so that several schedules can change one parameter in turn: for
# example a warm-up in steps 0 to 500, and a decay from step 500 on.


INF = int(1e9)


class ParamScheduler:
    """Sets `param_name` of every group of an optimizer, from `begin` to `end`, by epoch or by iteration."""

    need_val_args: ClassVar[bool] = False
    """Whether the schedule steps after each validation, with the metrics."""
    counts: ClassVar[tuple[str, ...]] = ("begin", "end")
    """Arguments that are numbers of steps, which `build_iter_from_epoch` converts."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Arguments that the class sets itself; a configuration may not contain them."""

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        """`optimizer` is a torch optimizer or an optim wrapper; `verbose` prints each value that is set."""
        if end <= begin:
            message = f"{end} is not after `begin`, which is {begin}"
            raise ConfigError(Problem(f"param_scheduler.{type(self).__name__}.end", message, "Write a larger number."))
        self.optimizer = optimizer
        self.param_name = param_name
        self.begin, self.end = begin, end
        self.by_epoch = by_epoch
        self.verbose = verbose
        initial = f"initial_{param_name}"
        if isinstance(last_step, bool) or not isinstance(last_step, int) or last_step < -1:
            message = f"{last_step!r} is not a number of steps"
            raise ConfigError(Problem("param_scheduler.last_step", message, "Leave it out, or write -1 or more."))
        for index, group in enumerate(optimizer.param_groups):
            if last_step == -1:
                group.setdefault(initial, read(group, param_name))
            elif initial not in group:
                message = f"{last_step}, but group {index} of the optimizer has no `{initial}`"
                remedy = "Leave last_step out: checkpoints hold the position of the schedule."
                raise ConfigError(Problem("param_scheduler.last_step", message, remedy))
        self.base_values = [group[initial] for group in optimizer.param_groups]
        self.last_step = last_step
        self._global_step = -1
        self._start()
        self.step()

    def _start(self) -> None:
        """Compute what a subclass needs before the first value."""

    @classmethod
    def build_iter_from_epoch(
        cls, optimizer: Any, *, epoch_length: int | None = None, by_epoch: bool = True, **kw: Any
    ) -> Self:
        """Return a schedule that is configured in epochs and steps with every iteration."""
        if not by_epoch or not epoch_length:
            message = "needs a schedule by epoch, and a known epoch length"
            raise ConfigError(Problem("param_scheduler.convert_to_iter_based", message, "Leave it out."))
        for key in cls.counts:
            if kw.get(key) is not None and kw[key] != INF:
                many = isinstance(kw[key], list | tuple)
                kw[key] = [count * epoch_length for count in kw[key]] if many else kw[key] * epoch_length
        return cls(optimizer, **{**kw, "by_epoch": False})

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Count a step; from `begin` to `end`, set the new value of every group."""
        self._global_step += 1
        if self.begin <= self._global_step < self.end:
            self.last_step += 1
            for index, group in enumerate(self.optimizer.param_groups):
                value = self._value(group, read(group, self.param_name), self.base_values[index])
                write(group, self.param_name, value)
                if self.verbose:
                    print(f"{type(self).__name__}: {self.param_name} of group {index} is {value:.4e}")

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        """Return the next value of a group, from its current and its initial value."""
        raise NotImplementedError

    def get_last_value(self) -> list[float]:
        """Return the values of all groups."""
        return [read(group, self.param_name) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule."""
        return {"last_step": self.last_step, "global_step": self._global_step, "base_values": list(self.base_values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.last_step, self._global_step = int(state["last_step"]), int(state["global_step"])
        self.base_values = list(state["base_values"])

    @property
    def _length(self) -> int:
        """The number of steps from the first value to the last."""
        return self.end - self.begin - 1


def read(group: Mapping[str, Any], name: str) -> float:
    """Return the setting `name` of a group; the momentum of an optimizer with betas is the first beta."""
    if name == "momentum" and "momentum" not in group:
        return float(group["betas"][0])
    return float(group[name])


def write(group: dict[str, Any], name: str, value: float) -> None:
    """Set the setting of a group that `read` returns."""
    if name == "momentum" and "momentum" not in group:
        group["betas"] = (value, *group["betas"][1:])
    else:
        group[name] = value


# Monotonic schedules.


class ConstantParamScheduler(ParamScheduler):
    """Multiplies the value by `factor` at `begin`, and divides it by `factor` at the end."""

    def __init__(self, optimizer: Any, param_name: str, factor: float = 1.0 / 3, **kwargs: Any) -> None:
        self.factor = share("ConstantLR.factor", factor)
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.factor
        return value / self.factor if self.last_step == self._length else value


class LinearParamScheduler(ParamScheduler):
    """Linear from `start_factor` times the initial value to `end_factor` times it."""

    def __init__(
        self, optimizer: Any, param_name: str, start_factor: float = 1.0 / 3, end_factor: float = 1.0, **kwargs: Any
    ) -> None:
        self.start_factor = share("LinearLR.start_factor", start_factor)
        self.end_factor = share("LinearLR.end_factor", end_factor)
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.start_factor
        change = self.end_factor - self.start_factor
        return value * (1.0 + change / (self._length * self.start_factor + (self.last_step - 1) * change))


class ExponentialParamScheduler(ParamScheduler):
    """Multiplies the value by `gamma` at every step."""

    def __init__(self, optimizer: Any, param_name: str, gamma: float, **kwargs: Any) -> None:
        self.gamma = gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return value if self.last_step == 0 else value * self.gamma


class StepParamScheduler(ParamScheduler):
    """Multiplies the value by `gamma` every `step_size` steps."""

    counts = ("begin", "end", "step_size")

    def __init__(self, optimizer: Any, param_name: str, step_size: int, gamma: float = 0.1, **kwargs: Any) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return value * self.gamma if self.last_step and self.last_step % self.step_size == 0 else value


class MultiStepParamScheduler(ParamScheduler):
    """Multiplies the value by `gamma` at each milestone, a number of steps."""

    counts = ("begin", "end", "milestones")

    def __init__(
        self, optimizer: Any, param_name: str, milestones: Sequence[int], gamma: float = 0.1, **kwargs: Any
    ) -> None:
        self.milestones, self.gamma = Counter(milestones), gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return float(value * self.gamma ** self.milestones[self.last_step])


class PolyParamScheduler(ParamScheduler):
    """A polynomial of degree `power` from the initial value down to `eta_min`."""

    def __init__(
        self, optimizer: Any, param_name: str, eta_min: float = 0.0, power: float = 1.0, **kwargs: Any
    ) -> None:
        self.eta_min, self.power = eta_min, power
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value
        left = 1.0 - 1.0 / (self._length - self.last_step + 1)
        return float((value - self.eta_min) * left**self.power + self.eta_min)


class CosineAnnealingParamScheduler(ParamScheduler):
    """Half a cosine from the initial value down to `eta_min`, in `T_max` steps (default: `end - begin`)."""

    counts = ("begin", "end", "T_max")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        T_max: int | None = None,  # noqa: N803  # MMEngine's and torch's name
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.eta_min, self.eta_min_ratio = lowest(eta_min, eta_min_ratio)
        self.T_max = T_max or 0
        super().__init__(optimizer, param_name, **kwargs)

    def _start(self) -> None:
        self.T_max = self.T_max or self.end - self.begin

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        low = self.eta_min if self.eta_min_ratio is None else base * self.eta_min_ratio
        step, total = self.last_step, self.T_max
        if step == 0:
            return value
        if (step - 1 - total) % (2 * total) == 0:  # at the minimum the ratio below would divide by 0
            return value + (base - low) * (1 - math.cos(math.pi / total)) / 2
        ratio = (1 + math.cos(math.pi * step / total)) / (1 + math.cos(math.pi * (step - 1) / total))
        return ratio * (value - low) + low


def share(key: str, value: float) -> float:
    """Return `value`, a number from 0 to 1; raise `ConfigError` for any other number."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(Problem(f"param_scheduler.{key}", f"{value!r}", "Write a number from 0 to 1."))
    return value


def lowest(eta_min: float | None, ratio: float | None) -> tuple[float, float | None]:
    """Return (final value of a cosine, ratio of final to first value, if given instead); raise if both are given."""
    if eta_min is not None and ratio is not None:
        message = "and `eta_min_ratio` are both given"
        raise ConfigError(Problem("param_scheduler.eta_min", message, "Leave one of them out."))
    return eta_min or 0.0, ratio


# Cosine with restarts, one cycle, reduce on plateau.


class CosineRestartParamScheduler(ParamScheduler):
    """Half cosines one after another: each from its restart weight times the initial value down to `eta_min`."""

    counts = ("begin", "end", "periods")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        periods: Sequence[int],
        restart_weights: Sequence[float] = (1,),
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if len(periods) != len(restart_weights):
            message = f"{len(restart_weights)} weights for {len(periods)} periods"
            raise ConfigError(Problem("param_scheduler.restart_weights", message, "Give one weight per period."))
        self.eta_min, self.eta_min_ratio = lowest(eta_min, eta_min_ratio)
        self.periods, self.restart_weights = list(periods), list(restart_weights)
        self._period_ends = list(accumulate(periods))
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        which = bisect_left(self._period_ends, self.last_step + 1)
        if which == len(self.periods):
            return value
        low = self.eta_min if self.eta_min_ratio is None else base * self.eta_min_ratio
        step, total = self.last_step - (self._period_ends[which] - self.periods[which]), self.periods[which]
        if step == 0:
            return base * self.restart_weights[which]
        ratio = (1 + math.cos(math.pi * step / total)) / (1 + math.cos(math.pi * (step - 1) / total))
        return ratio * (value - low) + low


class OneCycleParamScheduler(ParamScheduler):
    """From `eta_max` / `div_factor` up to `eta_max`, then down to almost 0."""

    counts = ("begin", "end", "total_steps")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        eta_max: float | Sequence[float] = 0.0,
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            message = f"{anneal_strategy!r}"
            raise ConfigError(Problem("param_scheduler.anneal_strategy", message, "Write 'cos' or 'linear'."))
        if param_name != "lr":
            message = f"{param_name!r}: one cycle is for the learning rate only"
            raise ConfigError(Problem("param_scheduler.param_name", message, "Write 'lr'."))
        if total_steps is not None and (not isinstance(total_steps, int) or total_steps <= 0):
            message = f"{total_steps!r}"
            raise ConfigError(Problem("param_scheduler.total_steps", message, "Write a number of steps above 0."))
        self.total_steps = total_steps or 0
        self.eta_max, self.pct_start = eta_max, share("OneCycleLR.pct_start", pct_start)
        self.three_phase, self._cosine = three_phase, anneal_strategy == "cos"
        peaks = _one_per_group(optimizer, "eta_max", eta_max)
        if any(peak <= 0.0 for peak in peaks):
            message = f"{eta_max!r} is not above 0"
            raise ConfigError(Problem("param_scheduler.eta_max", message, "Write the highest learning rate."))
        if kwargs.get("last_step", -1) == -1:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["initial_lr"], group["max_lr"] = peak / div_factor, peak
                group["min_lr"] = peak / div_factor / final_div_factor
        super().__init__(optimizer, param_name, **kwargs)

    def _start(self) -> None:
        total = self.total_steps = self.total_steps or self.end - self.begin
        up = self.pct_start * total - 1
        if self.three_phase:
            points = [(up, "initial_lr", "max_lr"), (2 * up, "max_lr", "initial_lr")]
            self._phases = [*points, (total - 1.0, "initial_lr", "min_lr")]
        else:
            self._phases = [(up, "initial_lr", "max_lr"), (total - 1.0, "max_lr", "min_lr")]

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step > self.total_steps:
            message = f"{self.total_steps}, but the schedule is at step {self.last_step + 1}"
            remedy = "Write the steps of the whole run, or an `end` for the schedule."
            raise ConfigError(Problem("param_scheduler.total_steps", message, remedy))
        begin = 0.0
        for end, start, stop in self._phases:
            if self.last_step <= end or end == self._phases[-1][0]:
                progress = (self.last_step - begin) / (end - begin)
                first, last = float(group[start]), float(group[stop])
                if self._cosine:
                    return last + (first - last) / 2.0 * (1 + math.cos(math.pi * progress))
                return first + (last - first) * progress
            begin = end
        raise AssertionError("unreachable: the last phase has no end")


class ReduceOnPlateauParamScheduler(ParamScheduler):
    """Multiplies the value by `factor` when a validation metric has not improved for `patience` validations."""

    need_val_args: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        monitor: str = "loss",
        rule: str = "less",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_rule: str = "rel",
        cooldown: int = 0,
        min_value: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        for key, choice, choices in (
            ("rule", rule, ("less", "greater")),
            ("threshold_rule", threshold_rule, ("rel", "abs")),
        ):
            if choice not in choices:
                raise ConfigError(Problem(f"param_scheduler.{key}", f"{choice!r}", f"Write {' or '.join(choices)}."))
        if factor >= 1.0:
            raise ConfigError(Problem("param_scheduler.factor", f"{factor!r}", "Write a number below 1."))
        if threshold < 0.0:
            raise ConfigError(Problem("param_scheduler.threshold", f"{threshold!r}", "Write 0 or a larger number."))
        self.monitor, self.factor, self.patience, self.eps = monitor, factor, patience, eps
        self.min_value = _one_per_group(optimizer, "min_value", min_value)
        self.cooldown, self._sign = cooldown, 1.0 if rule == "less" else -1.0
        self._threshold, self._relative = threshold, threshold_rule == "rel"
        self._best: float | None = None
        self._bad = self._cooling = 0
        super().__init__(optimizer, param_name, **kwargs)
        if not self.by_epoch:
            raise ConfigError(Problem("param_scheduler.by_epoch", "it steps after validations", "Leave it out."))

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Compare a validation's metric with the best so far, and reduce the value if it is time.

        Without metrics, only count a step.
        """
        if metrics is None:
            self._global_step += 1
            return
        if self.monitor not in metrics:
            remedy = f"The metrics are {', '.join(metrics)}."
            raise ConfigError(Problem("param_scheduler.monitor", f"unknown metric {self.monitor!r}", remedy))
        if not self.begin <= self._global_step < self.end:
            return
        self.last_step += 1
        value = self._sign * float(metrics[self.monitor])
        if self._best is None or value < self._best - self._margin():
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_value, strict=True):
                rate = read(group, self.param_name)
                if rate - (lower := max(rate * self.factor, least)) > self.eps:
                    write(group, self.param_name, lower)
            self._cooling, self._bad = self.cooldown, 0

    def _margin(self) -> float:
        assert self._best is not None
        # Relative to the signed best value, as in MMEngine: with a negative best, a worse value may count as better.
        return self._sign * self._best * self._threshold if self._relative else self._threshold

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule, and the best value."""
        return {**super().state_dict(), "best": self._best, "bad": self._bad, "resting": self._cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._best, self._bad, self._cooling = state["best"], int(state["bad"]), int(state["resting"])


def _one_per_group(optimizer: Any, key: str, value: float | Sequence[float]) -> list[float]:
    """Return a value for each parameter group; `value` has one per group, or is one for all groups."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) == groups - 1 and getattr(optimizer, "base_param_settings", None) is not None:
        values.append(values[-1])  # `base_param_settings` of an optim wrapper
    if len(values) != groups:
        message = f"{len(values)} values for {groups} parameter groups"
        raise ConfigError(Problem(f"param_scheduler.{key}", message, "Give one per group, or one number for all."))
    return values


S = TypeVar("S", bound=ParamScheduler)


def _named_schedule(schedule: type[S], param: str, name: str) -> type[S]:
    """Return a subclass of a schedule that changes one parameter, `param`."""

    def start(self: S, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        schedule.__init__(self, optimizer, param, *args, **kwargs)

    named = {"__init__": start, "__module__": __name__, "__doc__": schedule.__doc__, "fixed": ("param_name",)}
    made = type(name, (schedule,), named)
    PARAM_SCHEDULERS.register_module(name=name, module=made)
    return made


for _schedule in (
    ConstantParamScheduler,
    LinearParamScheduler,
    ExponentialParamScheduler,
    StepParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    OneCycleParamScheduler,
    ReduceOnPlateauParamScheduler,
):
    PARAM_SCHEDULERS.register_module(module=_schedule)

ConstantLR = _named_schedule(ConstantParamScheduler, "lr", "ConstantLR")
ConstantMomentum = _named_schedule(ConstantParamScheduler, "momentum", "ConstantMomentum")
LinearLR = _named_schedule(LinearParamScheduler, "lr", "LinearLR")
LinearMomentum = _named_schedule(LinearParamScheduler, "momentum", "LinearMomentum")
ExponentialLR = _named_schedule(ExponentialParamScheduler, "lr", "ExponentialLR")
ExponentialMomentum = _named_schedule(ExponentialParamScheduler, "momentum", "ExponentialMomentum")
StepLR = _named_schedule(StepParamScheduler, "lr", "StepLR")
StepMomentum = _named_schedule(StepParamScheduler, "momentum", "StepMomentum")
MultiStepLR = _named_schedule(MultiStepParamScheduler, "lr", "MultiStepLR")
MultiStepMomentum = _named_schedule(MultiStepParamScheduler, "momentum", "MultiStepMomentum")
PolyLR = _named_schedule(PolyParamScheduler, "lr", "PolyLR")
PolyMomentum = _named_schedule(PolyParamScheduler, "momentum", "PolyMomentum")
CosineAnnealingLR = _named_schedule(CosineAnnealingParamScheduler, "lr", "CosineAnnealingLR")
CosineAnnealingMomentum = _named_schedule(CosineAnnealingParamScheduler, "momentum", "CosineAnnealingMomentum")
CosineRestartLR = _named_schedule(CosineRestartParamScheduler, "lr", "CosineRestartLR")
OneCycleLR = _named_schedule(OneCycleParamScheduler, "lr", "OneCycleLR")
ReduceOnPlateauLR = _named_schedule(ReduceOnPlateauParamScheduler, "lr", "ReduceOnPlateauLR")


# `param_scheduler=dict(type=…)`.


def build_schedulers(runner: Any, cfg: Any) -> list[Any]:
    """Return the schedules of a run, over its optim wrapper."""
    if cfg is None:
        return []
    return [_build(runner, item) for item in (cfg if isinstance(cfg, list | tuple) else [cfg])]


def _build(runner: Any, cfg: Any) -> Any:
    if not isinstance(cfg, Mapping):
        if not hasattr(cfg, "step"):
            message = f"a {type(cfg).__name__} is not a schedule"
            raise ConfigError(Problem("param_scheduler", message, "Give a dict with its type."))
        return cfg
    options = dict(cfg)
    convert = options.pop("convert_to_iter_based", False)
    loop = runner.phases.loop("train")
    by_epoch = options.get("by_epoch", True)
    options.setdefault("end", loop.max_epochs if by_epoch else loop.max_iters)
    schedule_type = options.get("type", "")
    cls = PARAM_SCHEDULERS.get(schedule_type) if isinstance(schedule_type, str) else schedule_type
    if not (isinstance(cls, type) and issubclass(cls, ParamScheduler)):
        message = f"{schedule_type!r} is not a schedule of this front end"
        raise ConfigError(Problem("param_scheduler.type", message, f"Write one of {', '.join(PARAM_SCHEDULERS)}."))
    if not convert:
        return PARAM_SCHEDULERS.build({**options, "type": cls}, default_args={"optimizer": runner.optim_wrapper})
    options.pop("type")
    length = len(loop.dataloader)
    return cls.build_iter_from_epoch(runner.optim_wrapper, epoch_length=length, **options)
