"""Moves the schedules on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Those by iterations after each of them, those by epochs after each epoch."""

    priority = "LOW"

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Step the schedules that count iterations."""
        for scheduler in runner.param_schedulers:
            if not scheduler.by_epoch:
                scheduler.step()

    def after_train_epoch(self, runner: Any) -> None:
        """Step the schedules that count epochs."""
        for scheduler in runner.param_schedulers:
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Show metrics to the schedules that wait for them."""
        if metrics is not None and runner.is_training:
            for scheduler in runner.param_schedulers:
                if getattr(scheduler, "need_val_args", False):
                    scheduler.step(metrics)
