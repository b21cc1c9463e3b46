"""Ends training when a metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.hooks.hook import Hook, seems_greater
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """Stops after `patience` validations without a gain of `min_delta`."""

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: str | None = None,
        min_delta: float = 0.1,
        strict: bool = False,
        check_finite: bool = True,
        patience: int = 5,
        stopping_threshold: float | None = None,
    ) -> None:
        """`strict`: a validation without the metric is an error. `stopping_threshold`: good enough to stop at once."""
        if rule not in (None, "greater", "less"):
            raise ConfigError(Problem("EarlyStoppingHook.rule", f"{rule!r}", "Write 'greater' or 'less'."))
        greater = rule == "greater" if rule is not None else seems_greater(monitor)
        self.monitor, self.strict, self.check_finite, self.patience = monitor, strict, check_finite, patience
        self._sign = 1.0 if greater else -1.0
        self._delta = abs(min_delta)
        self._enough = stopping_threshold
        self._best = -math.inf
        self._waited = 0

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Look at the metric."""
        if not metrics or self.monitor not in metrics:
            if self.strict:
                remedy = f"The metrics are {', '.join(metrics or {}) or 'none'}."
                raise ConfigError(Problem("EarlyStoppingHook.monitor", f"there is no {self.monitor!r}", remedy))
            return
        reason = self._reason(float(metrics[self.monitor]))
        if reason and runner.is_training:
            runner.logger.info(f"training stops early: {reason}")
            runner.train_loop.stop_training = True

    def _reason(self, value: float) -> str | None:
        score = self._sign * value
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self._enough is not None and score > self._sign * self._enough:
            return f"{self.monitor} is {value:g}, beyond stopping_threshold={self._enough:g}"
        if score > self._best + self._delta:
            self._best, self._waited = score, 0
            return None
        self._waited += 1
        if self._waited < self.patience:
            return None
        return f"{self.monitor} did not gain {self._delta:g} in {self._waited} validations"

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Remember how far it got."""
        best = self._best if math.isfinite(self._best) else None
        checkpoint["early_stopping"] = {"best": best, "waited": self._waited}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        if (state := checkpoint.get("early_stopping")) is not None:
            self._best = -math.inf if state["best"] is None else float(state["best"])
            self._waited = int(state["waited"])
