"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from plait.config import EmaConfig
from plait.runner.hooks.base import Hook
from plait.strategy import StepResult
from plait.torch_internals import foreach_lerp_

if TYPE_CHECKING:
    from plait.runner.runner import Runner


class Ema(Hook):
    """Averages each rank's part of the weights; validates with the average, and saves it beside them."""

    name = "ema"
    priority = 40

    def __init__(self, config: EmaConfig) -> None:
        self._decay = config.decay
        self._every = config.every
        self._average: dict[str, Tensor] = {}

    def before_run(self, runner: Runner) -> None:
        """Start from the weights as they are, unless a checkpoint brought an average."""
        self._start(runner)

    def _start(self, runner: Runner) -> None:
        if not self._average:
            self._average = {name: weight.clone() for name, weight in runner.engine.weights().items()}

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Move the average towards the new weights."""
        # Asked last: to know whether a step was skipped is to wait for it.
        if runner.step % self._every == 0 and not result.skipped:
            weights = list(runner.engine.weights().values())
            foreach_lerp_(list(self._average.values()), weights, 1.0 - self._decay**self._every)

    def before_validate(self, runner: Runner) -> None:
        """Validate with the average."""
        self._swap(runner)

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Go on training with the weights."""
        self._swap(runner)

    def before_test(self, runner: Runner) -> None:
        """Test with the average."""
        self._swap(runner)

    def after_test(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Go on with the weights."""
        self._swap(runner)

    def _swap(self, runner: Runner) -> None:
        if self._average:
            for name, weight in runner.engine.weights().items():
                kept = weight.clone()
                weight.copy_(self._average[name])
                self._average[name].copy_(kept)
            runner.engine.weights_changed()

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """The average, in the layout of the weights."""
        self._start(runner)
        return {name: runner.engine.as_whole(name, tensor) for name, tensor in self._average.items()}
