"""Tells the message hub where the run is, and what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Position, learning rates, losses and metrics, for whoever asks the hub."""

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._result: Any = None
        self._stage: Any = None

    def before_run(self, runner: Any) -> None:
        """Note what the run is."""
        words = {"cfg": runner.cfg.pretty_text, "seed": runner.seed, "experiment_name": runner.experiment_name}
        runner.message_hub.update_info_dict(words, resumed=False)

    def before_train(self, runner: Any) -> None:
        """Note where training begins, and ends."""
        hub = runner.message_hub
        hub.update_info("loop_stage", "train", resumed=False)
        for key in ("epoch", "iter", "max_epochs", "max_iters"):
            hub.update_info(key, getattr(runner, key))
        if (meta := getattr(runner.train_dataloader.dataset, "metainfo", None)) is not None:
            hub.update_info("dataset_meta", meta, resumed=False)

    def before_train_epoch(self, runner: Any) -> None:
        """Note the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Note the iteration and the learning rates."""
        runner.message_hub.update_info("iter", runner.iter)
        for name, rates in runner.optim_wrapper.get_lr().items():
            runner.message_hub.update_scalar(f"train/{name}", rates[0])

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Note the losses and, where gradients are clipped by their norm, that."""
        wrapper = runner.optim_wrapper
        result = wrapper.last_result
        if "clip_norm" in wrapper.clip and result is not self._result:
            self._result = result
            runner.message_hub.update_scalar("train/grad_norm", lambda: result.grad_norm)
        for key, value in (outputs or {}).items():
            runner.message_hub.update_scalar(f"train/{key}", value)

    def after_train(self, runner: Any) -> None:
        """Training is over."""
        runner.message_hub.pop_info("loop_stage")

    def before_val(self, runner: Any) -> None:
        """A validation, perhaps in the middle of training."""
        self._stage = runner.message_hub.get_info("loop_stage")
        runner.message_hub.update_info("loop_stage", "val", resumed=False)

    def after_val(self, runner: Any) -> None:
        """Back to what was before."""
        runner.message_hub.update_info("loop_stage", self._stage, resumed=False)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Note the metrics."""
        _note(runner, "val", metrics)

    def before_test(self, runner: Any) -> None:
        """A test."""
        runner.message_hub.update_info("loop_stage", "test", resumed=False)

    def after_test(self, runner: Any) -> None:
        """It is over."""
        runner.message_hub.pop_info("loop_stage")

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Note the metrics."""
        _note(runner, "test", metrics)


def _note(runner: Any, mode: str, metrics: Mapping[str, Any] | None) -> None:
    for key, value in (metrics or {}).items():
        single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if single or hasattr(value, "item"):
            runner.message_hub.update_scalar(f"{mode}/{key}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{key}", value, resumed=False)
