"""The schedules that turn: cosines with restarts, one cycle, and the one that waits for a plateau."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim.curves import lowest
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
        eta_max: float,
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
        self.total_steps = total_steps or 0
        self.eta_max, self.pct_start, self.three_phase = eta_max, pct_start, three_phase
        self._cosine = anneal_strategy == "cos"
        self._first = eta_max / div_factor
        self._lowest = self._first / final_div_factor
        super().__init__(optimizer, param_name, **kwargs)

    def _start(self) -> None:
        total = self.total_steps = self.total_steps or self.end - self.begin
        up = self.pct_start * total - 1
        if self.three_phase:
            points = [(up, self._first, self.eta_max), (2 * up, self.eta_max, self._first)]
            self._phases = [*points, (total - 1.0, self._first, self._lowest)]
        else:
            self._phases = [(up, self._first, self.eta_max), (total - 1.0, self.eta_max, self._lowest)]
        if self.last_step == -1:
            for group in self.optimizer.param_groups:
                group[f"initial_{self.param_name}"] = self._first
            self.base_values = [self._first] * len(self.base_values)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        begin = 0.0
        for end, start, stop in self._phases:
            if self.last_step <= end or end == self._phases[-1][0]:
                part = (self.last_step - begin) / (end - begin)
                if self._cosine:
                    return stop + (start - stop) / 2.0 * (1 + math.cos(math.pi * part))
                return start + (stop - start) * part
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
        min_value: float = 0.0,
        eps: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        for key, word, words in (
            ("rule", rule, ("less", "greater")),
            ("threshold_rule", threshold_rule, ("rel", "abs")),
        ):
            if word not in words:
                raise ConfigError(Problem(f"param_scheduler.{key}", f"{word!r}", f"Write {' or '.join(words)}."))
        self.monitor, self.factor, self.patience, self.min_value, self.eps = monitor, factor, patience, min_value, eps
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
            for group in self.optimizer.param_groups:
                value = read(group, self.param_name)
                if value - (lower := max(value * self.factor, self.min_value)) > self.eps:
                    write(group, self.param_name, lower)
            self._resting, self._bad = self.cooldown, 0

    def _margin(self) -> float:
        assert self._best is not None
        return abs(self._best) * self._threshold if self._relative else self._threshold

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is."""
        return {**super().state_dict(), "best": self._best, "bad": self._bad, "resting": self._resting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._best, self._bad, self._resting = state["best"], int(state["bad"]), int(state["resting"])
