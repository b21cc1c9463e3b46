"""The schedules that turn: cosines with restarts, one cycle, and the one that waits for a plateau."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim.curves import lowest, share
from plait.frontends.mmengine.optim.scheduler import ParamScheduler, read, write


class CosineRestartParamScheduler(ParamScheduler):
    """Half cosines one after another, each from its share of the first value down to `eta_min`."""

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
            raise ConfigError(Problem("param_scheduler.restart_weights", message, "Give one a period."))
        self.eta_min, self.eta_min_ratio = lowest(eta_min, eta_min_ratio)
        self.periods, self.restart_weights = list(periods), list(restart_weights)
        self._ends = list(accumulate(periods))
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        which = bisect_left(self._ends, self.last_step + 1)
        if which == len(self.periods):
            return value
        low = self.eta_min if self.eta_min_ratio is None else base * self.eta_min_ratio
        step, total = self.last_step - (self._ends[which] - self.periods[which]), self.periods[which]
        if step == 0:
            return base * self.restart_weights[which]
        ratio = (1 + math.cos(math.pi * step / total)) / (1 + math.cos(math.pi * (step - 1) / total))
        return ratio * (value - low) + low


class OneCycleParamScheduler(ParamScheduler):
    """Up from a fraction of `eta_max` to it, and down to almost nothing."""

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
            message = f"{param_name!r}: one cycle is for learning rates only"
            raise ConfigError(Problem("param_scheduler.param_name", message, "Write 'lr'."))
        if total_steps is not None and (not isinstance(total_steps, int) or total_steps <= 0):
            message = f"{total_steps!r}"
            raise ConfigError(Problem("param_scheduler.total_steps", message, "Write a number of steps above 0."))
        self.total_steps = total_steps or 0
        self.eta_max, self.pct_start = eta_max, share("OneCycleLR.pct_start", pct_start)
        self.three_phase, self._cosine = three_phase, anneal_strategy == "cos"
        peaks = _one_per_group(optimizer, "eta_max", eta_max)
        if any(peak <= 0.0 for peak in peaks):
            message = f"{eta_max!r}: nothing would be learned"
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
            message = f"{self.total_steps}, but the schedule has come to step {self.last_step + 1}"
            remedy = "Write the steps of the whole run, or an `end` for the schedule."
            raise ConfigError(Problem("param_scheduler.total_steps", message, remedy))
        begin = 0.0
        for end, start, stop in self._phases:
            if self.last_step <= end or end == self._phases[-1][0]:
                part = (self.last_step - begin) / (end - begin)
                first, last = float(group[start]), float(group[stop])
                if self._cosine:
                    return last + (first - last) / 2.0 * (1 + math.cos(math.pi * part))
                return first + (last - first) * part
            begin = end
        raise AssertionError("the last phase takes what is left")


class ReduceOnPlateauParamScheduler(ParamScheduler):
    """`factor` times the value when a metric of the validation no longer gets better."""

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
        for key, word, words in (
            ("rule", rule, ("less", "greater")),
            ("threshold_rule", threshold_rule, ("rel", "abs")),
        ):
            if word not in words:
                raise ConfigError(Problem(f"param_scheduler.{key}", f"{word!r}", f"Write {' or '.join(words)}."))
        if factor >= 1.0:
            raise ConfigError(Problem("param_scheduler.factor", f"{factor!r}", "Write a number below 1."))
        if threshold < 0.0:
            raise ConfigError(Problem("param_scheduler.threshold", f"{threshold!r}", "Write 0 or a larger number."))
        self.monitor, self.factor, self.patience, self.eps = monitor, factor, patience, eps
        self.min_value = _one_per_group(optimizer, "min_value", min_value)
        self.cooldown, self._sign = cooldown, 1.0 if rule == "less" else -1.0
        self._threshold, self._relative = threshold, threshold_rule == "rel"
        self._best: float | None = None
        self._bad = self._resting = 0
        super().__init__(optimizer, param_name, **kwargs)
        if not self.by_epoch:
            raise ConfigError(Problem("param_scheduler.by_epoch", "false: it steps after validations", "Leave it out."))

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Look at the metrics of a validation."""
        if metrics is None:
            self._global_step += 1
            return
        if self.monitor not in metrics:
            remedy = f"The metrics are {', '.join(metrics)}."
            raise ConfigError(Problem("param_scheduler.monitor", f"there is no metric {self.monitor!r}", remedy))
        if not self.begin <= self._global_step < self.end:
            return
        self.last_step += 1
        found = self._sign * float(metrics[self.monitor])
        if self._best is None or found < self._best - self._margin():
            self._best, self._bad = found, 0
        else:
            self._bad += 1
        if self._resting > 0:
            self._resting, self._bad = self._resting - 1, 0
        if self._bad > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_value, strict=True):
                value = read(group, self.param_name)
                if value - (lower := max(value * self.factor, least)) > self.eps:
                    write(group, self.param_name, lower)
            self._resting, self._bad = self.cooldown, 0

    def _margin(self) -> float:
        assert self._best is not None
        # A share of the best value with its sign, as in MMEngine: a negative one may then be beaten by less.
        return self._sign * self._best * self._threshold if self._relative else self._threshold

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is."""
        return {**super().state_dict(), "best": self._best, "bad": self._bad, "resting": self._resting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._best, self._bad, self._resting = state["best"], int(state["bad"]), int(state["resting"])


def _one_per_group(optimizer: Any, key: str, value: float | Sequence[float]) -> list[float]:
    """A value of each parameter group: a list as it is, a number for all of them."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) == groups - 1 and getattr(optimizer, "base_param_settings", None) is not None:
        values.append(values[-1])  # the group of an optim wrapper that only shows the rate without multipliers
    if len(values) != groups:
        message = f"{len(values)} values for {groups} parameter groups"
        raise ConfigError(Problem(f"param_scheduler.{key}", message, "Give one per group, or one number for all."))
    return values
