"""Measures how long iterations take, and how much of that is waiting for data."""

from __future__ import annotations

import time
from typing import Any

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Sets `time`, `data_time` and, from their mean, `eta`."""

    priority = "NORMAL"

    def __init__(self) -> None:
        self._since = 0.0
        self._trained = 0.0
        self._evaluated = 0.0
        self._start = 0

    def before_train(self, runner: Any) -> None:
        """Count from here: a run may have been resumed."""
        self._start, self._trained = runner.iter, 0.0

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self._since = time.perf_counter()

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self._evaluated = 0.0

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        runner.message_hub.update_scalar(f"{mode}/data_time", time.perf_counter() - self._since)

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        now = time.perf_counter()
        took, self._since = now - self._since, now
        runner.message_hub.update_scalar(f"{mode}/time", took)
        if mode == "train":
            self._trained += took
            each = self._trained / (runner.iter - self._start + 1)
            left = runner.max_iters - runner.iter - 1
        else:
            self._evaluated += took
            each = self._evaluated / (batch_idx + 1)
            left = len(runner.loader_of(mode)) - batch_idx - 1
        runner.message_hub.update_info("eta", each * left, resumed=False)
