"""Stop when a metric no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.config import EarlyStopConfig
from plait.runner.best import Best
from plait.runner.hooks.base import Hook

if TYPE_CHECKING:
    from plait.runner.runner import Runner


class EarlyStop(Hook):
    """Ends the run when more than `patience` validations in a row had no gain of at least `min_delta`."""

    name = "early_stop"

    def __init__(self, config: EarlyStopConfig) -> None:
        self._best = Best(config.metric, config.mode, config.min_delta, path="hooks.early_stop.metric")
        self._patience = config.patience
        self._waited = 0

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        if self._waited > self._patience:
            runner.stop(f"{self._best.metric} has not improved for {self._waited} validations")

    def state(self) -> dict[str, Any]:
        """The best value, and how long ago it was."""
        return {"best": self._best.value, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._best.value = state["best"]
        self._waited = state["waited"]
