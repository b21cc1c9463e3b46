"""MMEngine's hooks: the base class, the default hooks, and their order."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.atomic_write import write_atomically
from plait.checkpoint import MANIFEST_NAME, remove_checkpoint
from plait.config import choose, read_json_object, read_lines
from plait.distributed import on_main
from plait.errors import CheckpointError, ConfigError, Problem
from plait.frontends.mmengine.registry import HOOKS
from plait.frontends.mmengine.visualization import Visualizer
from plait.trainer import Best, WeightAverage

# The base class of hooks, and their priorities.


PRIORITIES = {
    "HIGHEST": 0,
    "VERY_HIGH": 10,
    "HIGH": 30,
    "ABOVE_NORMAL": 40,
    "NORMAL": 50,
    "BELOW_NORMAL": 60,
    "LOW": 70,
    "VERY_LOW": 90,
    "LOWEST": 100,
}


class MMEngineHook:
    """The base class of hooks, whose methods the loops call: override some. Every rank calls every hook."""

    priority: int | str = "NORMAL"
    """A number from 0 (called first) to 100, or a name in `PRIORITIES`."""

    def before_run(self, runner: Any) -> None:
        """The run begins."""

    def after_run(self, runner: Any) -> None:
        """The run is over."""

    def before_train(self, runner: Any) -> None:
        """Training begins."""

    def after_train(self, runner: Any) -> None:
        """Training is over."""

    def before_val(self, runner: Any) -> None:
        """A validation begins."""

    def after_val(self, runner: Any) -> None:
        """A validation is over."""

    def before_test(self, runner: Any) -> None:
        """A test begins."""

    def after_test(self, runner: Any) -> None:
        """A test is over."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; JSON values that are added to the dict are saved with it."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was loaded; the dict is the one of `before_save_checkpoint`."""

    def before_train_epoch(self, runner: Any) -> None:
        """An epoch of training begins."""
        self._before_epoch(runner, mode="train")

    def before_val_epoch(self, runner: Any) -> None:
        """The pass over the validation data begins."""
        self._before_epoch(runner, mode="val")

    def before_test_epoch(self, runner: Any) -> None:
        """The pass over the test data begins."""
        self._before_epoch(runner, mode="test")

    def after_train_epoch(self, runner: Any) -> None:
        """An epoch of training is over."""
        self._after_epoch(runner, mode="train")

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """The pass over the validation data is over."""
        self._after_epoch(runner, mode="val")

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """The pass over the test data is over."""
        self._after_epoch(runner, mode="test")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """A batch is about to be trained on."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="train")

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """A batch is about to be validated on."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="val")

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """A batch is about to be tested on."""
        self._before_iter(runner, batch_idx=batch_idx, data_batch=data_batch, mode="test")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A batch was trained on; `outputs` are the losses."""
        self._after_iter(runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="train")

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A batch was validated on; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="val")

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """A batch was tested on; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs, mode="test")

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        """A pass over the data of any loop begins."""

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        """A pass over the data of any loop is over."""

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """A batch of any loop is about to be processed."""

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """A batch of any loop was processed."""

    # ---- conditions, for intervals

    def every_n_epochs(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether the number of completed epochs since `start` is a multiple of `n`."""
        done = runner.epoch + 1 - start
        return n > 0 and done >= 0 and done % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Whether the number of batches of the pass, up to this one, is a multiple of `n`."""
        return n > 0 and (batch_idx + 1) % n == 0

    def every_n_train_iters(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether the number of completed iterations since `start` is a multiple of `n`."""
        done = runner.iter + 1 - start
        return n > 0 and done >= 0 and done % n == 0

    def end_of_epoch(self, dataloader: Any, batch_idx: int) -> bool:
        """Whether the batch is the last one of its pass."""
        return batch_idx + 1 == len(dataloader)

    def is_last_train_epoch(self, runner: Any) -> bool:
        """Whether this is the last epoch."""
        return bool(runner.epoch + 1 == runner.max_epochs)

    def is_last_train_iter(self, runner: Any) -> bool:
        """Whether this is the last iteration."""
        return bool(runner.iter + 1 == runner.max_iters)


Hook = MMEngineHook
"""MMEngine's name of the class. Hooks of Plait's own Runner have another base class, `plait.trainer.Hook`."""


def priority_of(value: Any) -> int:
    """Return a priority as a number."""
    if isinstance(value, str) and value.upper() in PRIORITIES:
        return PRIORITIES[value.upper()]
    number = getattr(value, "value", value)  # MMEngine has an enum of its own
    if isinstance(number, int) and 0 <= number <= 100:
        return number
    remedy = f"Write a number from 0 to 100, or one of {', '.join(PRIORITIES)}."
    raise ConfigError(Problem("hook.priority", f"{value!r}", remedy))


_GREATER = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Metrics whose names contain one of these are better if larger."""


def seems_greater(metric: str, greater: tuple[str, ...] = (), less: tuple[str, ...] = ()) -> bool:
    """Whether larger values of a metric are better, inferred from its name as in MMEngine."""
    if metric in greater or metric in less:
        return metric in greater
    folded = metric.lower()
    if any(pattern.lower() in folded for pattern in greater or _GREATER):
        return True
    if any(pattern.lower() in folded for pattern in less or ("loss",)):
        return False
    message = f"the name {metric!r} does not show whether larger values are better"
    raise ConfigError(Problem("hook.rule", message, "Write rule='greater' or rule='less'."))


# Early stopping.


@HOOKS.register_module()
class EarlyStoppingHook(MMEngineHook):
    """Stops training after `patience` validations without a gain of more than `min_delta`.

    In `plait.trainer`'s early stopping, unlike here, a gain of exactly `min_delta` counts.
    """

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
        """`strict`: raise if the metric is missing. `stopping_threshold`: a value beyond which training stops."""
        if rule not in (None, "greater", "less"):
            raise ConfigError(Problem("EarlyStoppingHook.rule", f"{rule!r}", "Write 'greater' or 'less'."))
        greater = rule == "greater" if rule is not None else seems_greater(monitor)
        self.monitor, self.strict, self.check_finite, self.patience = monitor, strict, check_finite, patience
        self._sign = 1.0 if greater else -1.0
        self._delta = abs(min_delta)
        self._threshold = stopping_threshold
        self._best = -math.inf
        self._waited = 0

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Compare the metric with the best so far; stop training if `patience` is used up."""
        if not metrics or self.monitor not in metrics:
            if self.strict:
                remedy = f"The metrics are {', '.join(metrics or {}) or 'none'}."
                raise ConfigError(Problem("EarlyStoppingHook.monitor", f"unknown metric {self.monitor!r}", remedy))
            return
        reason = self._reason(float(metrics[self.monitor]))
        if reason and runner.is_training:
            runner.logger.info(f"training stops early: {reason}")
            runner.train_loop.stop_training = True

    def _reason(self, value: float) -> str | None:
        score = self._sign * value
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self._threshold is not None and score > self._sign * self._threshold:
            return f"{self.monitor} is {value:g}, beyond stopping_threshold={self._threshold:g}"
        if score > self._best + self._delta:
            self._best, self._waited = score, 0
            return None
        self._waited += 1
        if self._waited < self.patience:
            return None
        return f"{self.monitor} did not gain {self._delta:g} in {self._waited} validations"

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Save the best value, and the number of validations since then."""
        best = self._best if math.isfinite(self._best) else None
        checkpoint["early_stopping"] = {"best": best, "waited": self._waited}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the best value, and the number of validations since then."""
        if (state := checkpoint.get("early_stopping")) is not None:
            self._best = -math.inf if state["best"] is None else float(state["best"])
            self._waited = int(state["waited"])


# A moving average of the weights.


_EMA_TYPES = ("ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage")


@HOOKS.register_module()
class EMAHook(MMEngineHook):
    """Validates and tests with a moving average of the weights; saves the average in addition to the weights."""

    priority = "NORMAL"
    state_name = "ema"
    """The name under which a checkpoint stores the tensors of this hook."""

    def __init__(
        self,
        ema_type: str = "ExponentialMovingAverage",
        begin_iter: int = 0,
        begin_epoch: int = 0,
        momentum: float = 0.0002,
        gamma: int = 100,
        interval: int = 1,
    ) -> None:
        """`momentum`: the factor of the new weights in the average. `gamma` is used by MomentumAnnealingEMA only."""
        if ema_type not in _EMA_TYPES:
            raise ConfigError(Problem("EMAHook.ema_type", f"{ema_type!r}", f"Write one of {', '.join(_EMA_TYPES)}."))
        if begin_iter and begin_epoch:
            raise ConfigError(Problem("EMAHook.begin_iter", "and `begin_epoch` are both given", "Leave one out."))
        self._type, self._momentum, self._gamma, self._interval = ema_type, momentum, gamma, interval
        self._begin_iter, self._begin_epoch = begin_iter, begin_epoch
        self._average = WeightAverage()
        self._steps = 0

    def before_train(self, runner: Any) -> None:
        """Start the average with the current weights, unless one was loaded from a checkpoint."""
        self._average.start(runner.engine)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Update the average with the new weights; before `begin_iter` or `begin_epoch`, copy them."""
        started = self._started(runner)
        if not started or self._steps == 0:
            self._average.update(runner.engine, 1.0)
        elif self._steps % self._interval == 0:
            self._average.update(runner.engine, self._share())
        self._steps += int(started)

    def _share(self) -> float:
        if self._type == "StochasticWeightAverage":
            return 1.0 / (self._steps // self._interval + 1)
        if self._type == "MomentumAnnealingEMA":
            return max(self._momentum, self._gamma / (self._gamma + self._steps))
        return self._momentum

    def _started(self, runner: Any) -> bool:
        if self._begin_iter:
            return bool(runner.iter + 1 >= self._begin_iter)
        return bool(runner.epoch + 1 >= self._begin_epoch)

    def before_val_epoch(self, runner: Any) -> None:
        """Exchange the weights for the average, to validate with it."""
        self._average.swap(runner.engine)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Exchange the average for the weights, to train on with them."""
        self._average.swap(runner.engine)

    def before_test_epoch(self, runner: Any) -> None:
        """Exchange the weights for the average, to test with it."""
        self._average.swap(runner.engine)

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Exchange the average for the weights."""
        self._average.swap(runner.engine)

    # ---- checkpoints

    def tensors(self, runner: Any) -> dict[str, Tensor]:
        """Return the average, as a checkpoint stores it."""
        return self._average.tensors(runner.engine)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Save the number of steps since the average began."""
        checkpoint["ema"] = {"steps": self._steps}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the number of steps since the average began."""
        self._steps = int(checkpoint.get("ema", {}).get("steps", 0))


# Frees memory that torch's allocator has cached.


@HOOKS.register_module()
class EmptyCacheHook(MMEngineHook):
    """Empties the CUDA cache before or after epochs, or after iterations."""

    priority = "NORMAL"

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._points = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self._empty("before_epoch")

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self._empty("after_epoch")

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        self._empty("after_iter")

    def _empty(self, point: str) -> None:
        if self._points[point] and torch.cuda.is_available():
            torch.cuda.empty_cache()


# Time per iteration, and the part of it spent waiting for data.


@HOOKS.register_module()
class IterTimerHook(MMEngineHook):
    """Updates `time`, `data_time` and `eta` in the message hub."""

    priority = "NORMAL"

    def __init__(self) -> None:
        self._since = 0.0
        self._trained = 0.0
        self._evaluated = 0.0
        self._start = 0

    def before_train(self, runner: Any) -> None:
        """Start measuring, at the current iteration, which is not 0 in a resumed run."""
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
            mean_time = self._trained / (runner.iter - self._start + 1)
            left = runner.max_iters - runner.iter - 1
        else:
            self._evaluated += took
            mean_time = self._evaluated / (batch_idx + 1)
            left = len(runner.loader_of(mode)) - batch_idx - 1
        runner.message_hub.update_info("eta", mean_time * left, resumed=False)


# The lines of the log, and values for the sinks.


@HOOKS.register_module()
class LoggerHook(MMEngineHook):
    """Logs a line every `interval` iterations, and one after each validation and test."""

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
        """`ignore_last`: at the end of an epoch, log no line for a remainder of fewer than `interval` iterations."""
        for key, value in (("interval", interval), ("interval_exp_name", interval_exp_name)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(Problem(f"default_hooks.logger.{key}", f"{value!r}", "Write a number from 1."))
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
        """Log a line if it is due."""
        last = self.end_of_epoch(runner.train_dataloader, batch_idx)
        if last or self.every_n_train_iters(runner, self.interval_exp_name):
            runner.logger.info(f"Exp name: {runner.experiment_name}")
        short = not self.ignore_last or len(runner.train_dataloader) <= self.interval
        if self.every_n_inner_iters(batch_idx, self.interval) or (last and short):
            tag, line = runner.log_processor.get_log_after_iter(runner, batch_idx, "train")
            runner.logger.info(line)
            _show(runner, tag, runner.iter + 1, "train")

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log a line if it is due."""
        self._after_batch(runner, batch_idx, "val")

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log a line if it is due."""
        self._after_batch(runner, batch_idx, "test")

    def _after_batch(self, runner: Any, batch_idx: int, mode: str) -> None:
        if self.every_n_inner_iters(batch_idx, self.interval):
            runner.logger.info(runner.log_processor.get_log_after_iter(runner, batch_idx, mode)[1])

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Log a line with the metrics."""
        tag, line = runner.log_processor.get_log_after_epoch(runner, len(runner.val_dataloader), "val")
        runner.logger.info(line)
        step = runner.epoch if self.log_metric_by_epoch else runner.iter
        _show(runner, tag, step if runner.is_training else 0, "val")

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Log a line with the metrics, and write them to a file."""
        tag, line = runner.log_processor.get_log_after_epoch(runner, len(runner.test_dataloader), "test")
        runner.logger.info(line)
        _show(runner, tag, 0, "test")
        if runner.world.is_main:
            (runner.log_dir / f"{runner.timestamp}.json").write_text(json.dumps(tag, default=str), encoding="utf-8")


def _show(runner: Any, tag: dict[str, Any], step: int, mode: str) -> None:
    """Pass values to the visualizer; the one of MMEngine has no argument `mode`."""
    more = {"mode": mode} if isinstance(runner.visualizer, Visualizer) else {}
    runner.visualizer.add_scalars(tag, step=step, **more)


# Steps the parameter schedules.


@HOOKS.register_module()
class ParamSchedulerHook(MMEngineHook):
    """Steps schedules by iteration after each iteration, and schedules by epoch after each epoch."""

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
        """Step the schedules that need the metrics of a validation."""
        if metrics is not None and runner.is_training:
            for scheduler in runner.param_schedulers:
                if getattr(scheduler, "need_val_args", False):
                    scheduler.step(metrics)


# Keeps the position and measurements of the run in the message hub.


@HOOKS.register_module()
class RuntimeInfoHook(MMEngineHook):
    """Updates position, learning rates, losses and metrics in the message hub."""

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._result: Any = None
        self._stage: Any = None

    def before_run(self, runner: Any) -> None:
        """Set the configuration, seed and name of the run."""
        info = {"cfg": runner.cfg.pretty_text, "seed": runner.seed, "experiment_name": runner.experiment_name}
        runner.message_hub.update_info_dict(info, resumed=False)

    def before_train(self, runner: Any) -> None:
        """Set the current and the last epoch and iteration, and the `metainfo` of the data set."""
        hub = runner.message_hub
        hub.update_info("loop_stage", "train", resumed=False)
        for key in ("epoch", "iter", "max_epochs", "max_iters"):
            hub.update_info(key, getattr(runner, key))
        if (meta := getattr(runner.train_dataloader.dataset, "metainfo", None)) is not None:
            hub.update_info("dataset_meta", meta, resumed=False)

    def before_train_epoch(self, runner: Any) -> None:
        """Update the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Update the iteration and the learning rates."""
        runner.message_hub.update_info("iter", runner.iter)
        for name, rates in runner.optim_wrapper.get_lr().items():
            runner.message_hub.update_scalar(f"train/{name}", rates[0])

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Update the losses and, if gradients are clipped by norm, the gradient norm."""
        wrapper = runner.optim_wrapper
        result = wrapper.last_result
        if "clip_norm" in wrapper.clip and result is not self._result:
            self._result = result
            runner.message_hub.update_scalar("train/grad_norm", lambda: result.grad_norm)
        for key, value in (outputs or {}).items():
            runner.message_hub.update_scalar(f"train/{key}", value)

    def after_train(self, runner: Any) -> None:
        """Remove `loop_stage`."""
        runner.message_hub.pop_info("loop_stage")

    def before_val(self, runner: Any) -> None:
        """Set `loop_stage` to `val`, and remember its old value: validation may run during training."""
        self._stage = runner.message_hub.get_info("loop_stage")
        runner.message_hub.update_info("loop_stage", "val", resumed=False)

    def after_val(self, runner: Any) -> None:
        """Restore `loop_stage`."""
        runner.message_hub.update_info("loop_stage", self._stage, resumed=False)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Update the metrics."""
        _record(runner, "val", metrics)

    def before_test(self, runner: Any) -> None:
        """Set `loop_stage` to `test`."""
        runner.message_hub.update_info("loop_stage", "test", resumed=False)

    def after_test(self, runner: Any) -> None:
        """Remove `loop_stage`."""
        runner.message_hub.pop_info("loop_stage")

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Update the metrics."""
        _record(runner, "test", metrics)


def _record(runner: Any, mode: str, metrics: Mapping[str, Any] | None) -> None:
    for key, value in (metrics or {}).items():
        single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if single or hasattr(value, "item"):
            runner.message_hub.update_scalar(f"{mode}/{key}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{key}", value, resumed=False)


# A different order of samples in every epoch.


@HOOKS.register_module()
class DistSamplerSeedHook(MMEngineHook):
    """Sets the epoch of the sampler, so that each epoch has another order of samples."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Any) -> None:
        """Set the epoch of the sampler, or of the sampler inside a batch sampler."""
        set_epoch(runner.train_loop.dataloader, runner.epoch)


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of the sampler of a loader, or of the sampler inside its batch sampler."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for sampler in (getattr(loader, "sampler", None), inner):
        if (setter := getattr(sampler, "set_epoch", None)) is not None:
            setter(epoch)
            return


# Synchronizes buffers, such as running statistics, over ranks.


@HOOKS.register_module()
class SyncBuffersHook(MMEngineHook):
    """Synchronizes buffers after every epoch. Before validating and saving, the runner does so without this hook."""

    priority = "NORMAL"

    def after_train_epoch(self, runner: Any) -> None:
        """Average buffers over ranks."""
        runner.engine.sync_buffers()


# Checkpoints in a work_dir: `epoch_3`, `iter_500`, `best_accuracy_epoch_3`, and the file `last_checkpoint`.


def last_checkpoint(work_dir: Path) -> Path | None:
    """Return the checkpoint that the file `last_checkpoint` names; None if there is none."""
    marker = work_dir / "last_checkpoint"
    if not marker.is_file():
        return None
    path = Path("\n".join(read_lines(marker, CheckpointError)).strip())
    if not path.is_absolute() and not path.exists():
        path = work_dir / path.name
    return path if (path / MANIFEST_NAME).exists() else None


def resolve(text: str | Path) -> Path:
    """Return a checkpoint's folder or file; `epoch_3.pth`, as in MMEngine, may mean the folder `epoch_3`."""
    path = Path(text)
    if (path / MANIFEST_NAME).exists() or path.is_file():
        return path
    bare = path.with_suffix("") if path.suffix == ".pth" else path
    if (bare / MANIFEST_NAME).exists():
        return bare
    if path.is_dir() and (last := last_checkpoint(path)) is not None:
        return last
    raise CheckpointError(
        f"no checkpoint at {str(path)!r}: name a checkpoint folder (work_dir/epoch_3), a work_dir, or a file "
        "of torch.save"
    )


def keep_newest(folder: Path, template: str, count: int) -> None:
    """Remove all checkpoints whose names match a template (`epoch_{}`), except the newest `count`."""
    pattern = re.compile(re.escape(template).replace(r"\{\}", r"(\d+)") + "$")
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := pattern.match(path.name))]
    for _, path in sorted(numbered)[:-count]:
        remove_checkpoint(path)


# When checkpoints are written, and which are kept.


@HOOKS.register_module()
class CheckpointHook(MMEngineHook):
    """Saves every `interval` epochs or iterations, at the end, and with `save_best` after each best validation."""

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | Sequence[str] | None = None,
        rule: str | Sequence[str] | None = None,
        greater_keys: Sequence[str] | None = None,
        less_keys: Sequence[str] | None = None,
        file_client_args: Mapping[str, Any] | None = None,
        filename_tmpl: str | None = None,
        backend_args: Mapping[str, Any] | None = None,
        published_keys: str | Sequence[str] | None = None,
        save_begin: int = 0,
    ) -> None:
        refuse = {
            "file_client_args": (file_client_args, "Save to a folder, and copy it from there."),
            "backend_args": (backend_args, "Save to a folder, and copy it from there."),
            "published_keys": (published_keys, "`plait convert FOLDER FILE --to torch` writes the weights to a file."),
        }
        problems = [
            Problem(f"default_hooks.checkpoint.{key}", f"{value!r} is not supported", remedy)
            for key, (value, remedy) in refuse.items()
            if value is not None
        ]
        if problems:
            raise ConfigError(problems)
        self.interval, self.by_epoch, self.save_begin = interval, by_epoch, save_begin
        self.options = {"save_optimizer": save_optimizer, "save_param_scheduler": save_param_scheduler}
        self.out_dir, self.max_keep_ckpts, self.save_last = out_dir, max_keep_ckpts, save_last
        self.filename_tmpl = (filename_tmpl or ("epoch_{}" if by_epoch else "iter_{}")).removesuffix(".pth")
        self._best_records: dict[str, dict[str, Any]] = {}
        """The best checkpoints so far, by the suffix of their keys in the message hub."""
        self._best = [] if save_best is None else [save_best] if isinstance(save_best, str) else list(save_best)
        self._rules = [rule] if isinstance(rule, str) else list(rule or ())
        self._greater, self._less = tuple(greater_keys or ()), tuple(less_keys or ())
        if len(self._rules) not in (0, 1, len(self._best)):
            message = f"{len(self._rules)} rules for {len(self._best)} metrics"
            raise ConfigError(Problem("default_hooks.checkpoint.rule", message, "Give one rule, or one per metric."))
        for name in self._rules:
            if name not in ("greater", "less"):
                raise ConfigError(Problem("default_hooks.checkpoint.rule", f"{name!r}", "Write 'greater' or 'less'."))

    def before_train(self, runner: Any) -> None:
        """Find the folder, and the best checkpoints of a resumed run."""
        self._folder = Path(runner.work_dir if self.out_dir is None else self.out_dir)
        if self.out_dir is not None:
            self._folder /= Path(runner.work_dir).name
        self._record_file = Path(runner.work_dir) / "best_checkpoints.json"
        done = self._count(runner)
        # They are read from a file, because a checkpoint is written before the validation of its own weights.
        for key, best in on_main(runner.world, self._read_records).items():
            if best["at"] <= done:  # ignore records of later positions than the resumed one
                runner.message_hub.update_info(f"best_score{key}", best["score"])
                runner.message_hub.update_info(f"best_ckpt{key}", best["path"])
                self._best_records[key] = best

    def _read_records(self) -> dict[str, Any]:
        records = (
            read_json_object(self._record_file, CheckpointError, "remove it") if self._record_file.is_file() else {}
        )
        for key, best in records.items():
            match best:
                case {"at": int(), "score": int() | float(), "path": str()}:
                    continue
            raise CheckpointError(
                f"{self._record_file}: {key} is {best!r:.80}, expected at, score and path; remove the file"
            )
        return records

    def _count(self, runner: Any) -> int:
        return int(runner.epoch if self.by_epoch else runner.iter)

    def after_train_epoch(self, runner: Any) -> None:
        """Save a checkpoint if one is due, and saving is by epoch."""
        due = self.every_n_epochs(runner, self.interval, self.save_begin)
        if self.by_epoch and (due or (self.save_last and self.is_last_train_epoch(runner))):
            runner.logger.info(f"Saving checkpoint at {runner.epoch + 1} epochs")
            self._save(runner, runner.epoch + 1)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save a checkpoint if one is due, and saving is by iteration."""
        due = self.every_n_train_iters(runner, self.interval, self.save_begin)
        if not self.by_epoch and (due or (self.save_last and self.is_last_train_iter(runner))):
            runner.logger.info(f"Saving checkpoint at {runner.iter + 1} iterations")
            self._save(runner, runner.iter + 1)

    def _save(self, runner: Any, count: int) -> None:
        name = self.filename_tmpl.format(count)
        folder, marker = self._folder, Path(runner.work_dir) / "last_checkpoint"

        def tidy() -> None:
            write_atomically(marker, str(folder / name))
            if self.max_keep_ckpts > 0:
                keep_newest(folder, self.filename_tmpl, self.max_keep_ckpts)

        runner.save_checkpoint(folder, name, by_epoch=self.by_epoch, tidy=tidy, **self.options)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint if a metric of `save_best` is the best so far."""
        if not self._best or not runner.is_training or not metrics:
            return
        if self._best == ["auto"]:
            self._best = [next(iter(metrics))]
        for index, metric in enumerate(self._best):
            self._save_if_best(runner, metric, metrics, index)

    def _save_if_best(self, runner: Any, metric: str, metrics: Mapping[str, float], index: int) -> None:
        rule = (self._rules * len(self._best))[index] if self._rules else None
        greater = seems_greater(metric, self._greater, self._less) if rule is None else rule == "greater"
        hub, key = runner.message_hub, f"_{metric}" if len(self._best) > 1 else ""
        best = Best(metric, "max" if greater else "min", path="default_hooks.checkpoint.save_best")
        best.value = hub.get_info(f"best_score{key}")
        if not best.improved(metrics):
            return
        old = hub.get_info(f"best_ckpt{key}")
        unit, count = "epoch" if self.by_epoch else "iter", self._count(runner)
        name = f"best_{metric.replace('/', '_')}_{unit}_{count}"
        path, value = str(self._folder / name), float(metrics[metric])
        hub.update_info(f"best_score{key}", value)
        hub.update_info(f"best_ckpt{key}", path)
        self._best_records[key] = {"score": value, "path": path, "at": count}
        file, text, replaced = self._record_file, json.dumps(self._best_records), old is not None and old != path

        def tidy() -> None:
            write_atomically(file, text)
            if replaced:
                remove_checkpoint(Path(str(old)))

        # by_epoch=None: validation runs between epochs, when the last one is already counted.
        runner.save_checkpoint(self._folder, name, by_epoch=None, tidy=tidy, **self.options)
        if replaced:
            runner.logger.info(f"The previous best checkpoint {old} is removed")
        runner.logger.info(f"The best checkpoint with {value:.4f} {metric} at {count} {unit} is saved to {name}.")


# The hooks of a run, sorted by priority.


DEFAULT_HOOKS = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}


class SortedHooks:
    """The hooks of a run, sorted by priority; hooks with equal priorities are in the order of registration."""

    def __init__(self, default_hooks: Mapping[str, Any] | None, custom_hooks: Sequence[Any] | None) -> None:
        self.hooks: list[Any] = []
        given = {**DEFAULT_HOOKS, **(default_hooks or {})}
        for name, hook in given.items():
            if name not in DEFAULT_HOOKS and hook is None:
                problem = Problem(f"default_hooks.{name}", "unknown hook", choose(name, DEFAULT_HOOKS, "name"))
                raise ConfigError(problem)
            if hook is not None:
                self.register(hook)
        for hook in custom_hooks or ():
            self.register(hook)

    def register(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook, or the hook that a dict describes."""
        if isinstance(hook, Mapping):
            options = dict(hook)
            priority = options.pop("priority", priority)
            hook = HOOKS.build(options)
        if not callable(getattr(hook, "before_run", None)):
            message = f"a {type(hook).__name__} is not a hook"
            raise ConfigError(Problem("custom_hooks", message, "Derive it from plait.frontends.mmengine.Hook."))
        hook_type = type(hook)
        if hook_type.__module__.startswith("mmengine.hooks.") and hook_type.__name__ in tuple(HOOKS):
            message = f"MMEngine's own {hook_type.__name__} needs MMEngine's engine"
            raise ConfigError(
                Problem("custom_hooks", message, f"Write dict(type={hook_type.__name__!r}, …) for this front end's.")
            )
        if priority is not None:
            hook.priority = priority
        level = priority_of(hook.priority)
        index = next((i for i, other in enumerate(self.hooks) if priority_of(other.priority) > level), len(self.hooks))
        self.hooks.insert(index, hook)

    def call(self, runner: Any, point: str, **kwargs: Any) -> None:
        """Call a method of every hook that has it."""
        for hook in list(self.hooks):
            if (action := getattr(hook, point, None)) is not None:
                action(runner, **kwargs)

    def info(self) -> str:
        """Return the hooks in their order, one per line."""
        return "\n".join(f"({hook.priority!s:<12}) {type(hook).__name__}" for hook in self.hooks)
