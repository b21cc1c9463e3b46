"""Writes the lines of the log, and hands numbers to the sinks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS
from plait.frontends.mmengine.visualization import Visualizer


@HOOKS.register_module()
class LoggerHook(Hook):
    """A line every `interval` iterations, and one after each validation and test."""

    priority = "BELOW_NORMAL"

    def __init__(
        self,
        interval: int = 10,
        ignore_last: bool = True,
        interval_exp_name: int = 1000,
        out_dir: str | Path | None = None,
        out_suffix: str | tuple[str, ...] = (".json", ".log", ".py", "yaml"),
        keep_local: bool = True,
        file_client_args: Mapping[str, Any] | None = None,
        log_metric_by_epoch: bool = True,
        backend_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`ignore_last`: no line for the last iterations of an epoch, where fewer than `interval` are left."""
        for key, value in (("interval", interval), ("interval_exp_name", interval_exp_name)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(Problem(f"default_hooks.logger.{key}", f"{value!r}", "Write a number, 1 or more."))
        remote = {"out_dir": out_dir, "file_client_args": file_client_args, "backend_args": backend_args}
        problems = [
            Problem(f"default_hooks.logger.{key}", f"{value!r}: logs stay in work_dir", "Copy them from there.")
            for key, value in remote.items()
            if value is not None
        ]
        if problems:
            raise ConfigError(problems)
        self.interval = interval
        self.ignore_last = ignore_last
        self.interval_exp_name = interval_exp_name
        self.log_metric_by_epoch = log_metric_by_epoch

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A line, when it is due."""
        last = self.end_of_epoch(runner.train_dataloader, batch_idx)
        if last or self.every_n_train_iters(runner, self.interval_exp_name):
            runner.logger.info(f"Exp name: {runner.experiment_name}")
        short = not self.ignore_last or len(runner.train_dataloader) <= self.interval
        if self.every_n_inner_iters(batch_idx, self.interval) or (last and short):
            tag, line = runner.log_processor.get_log_after_iter(runner, batch_idx, "train")
            runner.logger.info(line)
            _show(runner, tag, runner.iter + 1, "train")

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A line, when it is due."""
        self._after_batch(runner, batch_idx, "val")

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A line, when it is due."""
        self._after_batch(runner, batch_idx, "test")

    def _after_batch(self, runner: Any, batch_idx: int, mode: str) -> None:
        if self.every_n_inner_iters(batch_idx, self.interval):
            runner.logger.info(runner.log_processor.get_log_after_iter(runner, batch_idx, mode)[1])

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """A line with the metrics."""
        tag, line = runner.log_processor.get_log_after_epoch(runner, len(runner.val_dataloader), "val")
        runner.logger.info(line)
        step = runner.epoch if self.log_metric_by_epoch else runner.iter
        _show(runner, tag, step if runner.is_training else 0, "val")

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """A line with the metrics, and a file of them."""
        tag, line = runner.log_processor.get_log_after_epoch(runner, len(runner.test_dataloader), "test")
        runner.logger.info(line)
        _show(runner, tag, 0, "test")
        if runner.world.is_main:
            (runner.log_dir / f"{runner.timestamp}.json").write_text(json.dumps(tag, default=str), encoding="utf-8")


def _show(runner: Any, tag: dict[str, Any], step: int, mode: str) -> None:
    """Hand numbers to the visualizer; one of MMEngine's own does not ask of which phase they are."""
    more = {"mode": mode} if isinstance(runner.visualizer, Visualizer) else {}
    runner.visualizer.add_scalars(tag, step=step, **more)
