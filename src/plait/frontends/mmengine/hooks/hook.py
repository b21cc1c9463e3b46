"""The points of a run at which a hook may act, and in which order hooks do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem

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


class Hook:
    """Override the points you need. Every rank runs every hook."""

    priority: int | str = "NORMAL"
    """A number from 0, the first, to 100, or one of the words."""

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
        """A checkpoint is about to be written; what is put into the dict, and JSON can hold, goes with it."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read; the dict is what `before_save_checkpoint` saw."""

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
        """Any pass begins."""

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        """Any pass is over."""

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Any batch is about to be worked on."""

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Any batch was worked on."""

    # ---- when?

    def every_n_epochs(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether the epoch just done is one of every n, counted from `start`."""
        done = runner.epoch + 1 - start
        return n > 0 and done >= 0 and done % n == 0

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Whether the batch is one of every n of its pass."""
        return n > 0 and (batch_idx + 1) % n == 0

    def every_n_train_iters(self, runner: Any, n: int, start: int = 0) -> bool:
        """Whether the iteration just done is one of every n, counted from `start`."""
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


def priority_of(value: Any) -> int:
    """A priority as a number."""
    if isinstance(value, str) and value.upper() in PRIORITIES:
        return PRIORITIES[value.upper()]
    number = getattr(value, "value", value)  # MMEngine has an enum of its own
    if isinstance(number, int) and 0 <= number <= 100:
        return number
    remedy = f"Write a number from 0 to 100, or one of {', '.join(PRIORITIES)}."
    raise ConfigError(Problem("hook.priority", f"{value!r}", remedy))


def seems_greater(metric: str, greater: tuple[str, ...] = (), less: tuple[str, ...] = ()) -> bool:
    """Whether more of a metric is better, judged by its name as MMEngine judges it."""
    usual = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
    if metric in greater or metric in less:
        return metric in greater
    folded = metric.lower()
    if any(word.lower() in folded for word in (*(greater or usual),)):
        return True
    if any(word.lower() in folded for word in (*(less or ("loss",)),)):
        return False
    message = f"whether more or less of {metric!r} is better cannot be told from its name"
    raise ConfigError(Problem("hook.rule", message, "Write rule='greater' or rule='less'."))
