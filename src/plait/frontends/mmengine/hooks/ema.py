"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS
from plait.torch_internals import foreach_copy_, foreach_lerp_

_TYPES = ("ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage")


@HOOKS.register_module()
class EMAHook(Hook):
    """Averages each rank's part of the weights; validates and tests with the average, and saves it beside them."""

    priority = "NORMAL"
    state_name = "ema"
    """Under which name a checkpoint has its tensors."""

    def __init__(
        self,
        ema_type: str = "ExponentialMovingAverage",
        begin_iter: int = 0,
        begin_epoch: int = 0,
        momentum: float = 0.0002,
        gamma: int = 100,
        interval: int = 1,
    ) -> None:
        """`momentum` is the share of the new weights; `gamma` belongs to MomentumAnnealingEMA."""
        if ema_type not in _TYPES:
            raise ConfigError(Problem("EMAHook.ema_type", f"{ema_type!r}", f"Write one of {', '.join(_TYPES)}."))
        if begin_iter and begin_epoch:
            raise ConfigError(Problem("EMAHook.begin_iter", "and `begin_epoch` are both given", "Leave one out."))
        self._type, self._momentum, self._gamma, self._interval = ema_type, momentum, gamma, interval
        self._begin_iter, self._begin_epoch = begin_iter, begin_epoch
        self._average: dict[str, Tensor] = {}
        self._steps = 0

    def before_train(self, runner: Any) -> None:
        """Start from the weights as they are, unless a checkpoint brought an average."""
        if not self._average:
            self._average = {name: weight.clone() for name, weight in runner.engine.weights().items()}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Move the average towards the new weights."""
        weights = list(runner.engine.weights().values())
        average = list(self._average.values())
        if not self._started(runner) or self._steps == 0:
            foreach_copy_(average, weights)
        elif self._steps % self._interval == 0:
            foreach_lerp_(average, weights, self._share())
        if self._started(runner):
            self._steps += 1

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
        """Validate with the average."""
        self._swap(runner)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Go on training with the weights."""
        self._swap(runner)

    def before_test_epoch(self, runner: Any) -> None:
        """Test with the average."""
        self._swap(runner)

    def after_test_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Go on with the weights."""
        self._swap(runner)

    def _swap(self, runner: Any) -> None:
        if self._average:
            with torch.no_grad():
                for name, weight in runner.engine.weights().items():
                    kept = weight.clone()
                    weight.copy_(self._average[name])
                    self._average[name].copy_(kept)
            runner.engine.weights_changed()

    # ---- in a checkpoint

    def tensors(self, runner: Any) -> dict[str, Tensor]:
        """The average, as the logical whole that a checkpoint stores."""
        self.before_train(runner)
        return {name: runner.engine.as_whole(name, part) for name, part in self._average.items()}

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Remember how many weights were averaged."""
        checkpoint["ema"] = {"steps": self._steps}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps = int(checkpoint.get("ema", {}).get("steps", 0))
