"""A step as a sequence of micro-batches, for `train_step` and for custom loops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plait.data import MicroBatch
from plait.engine.base import Engine, StepResult
from plait.engine.loss import LossNormalizer, WeightedLoss
from plait.errors import TrainingError
from plait.launch import Phase


class SteppingEngine(Engine):
    """Counts micro-batches and divides their losses; forward, backward and update are a subclass's."""

    accumulation: int
    """How many micro-batches `backward` counts to a step."""
    _normalizer: LossNormalizer
    _pending = 0
    _awaits_backward = False

    @abstractmethod
    def _forward_loss(self, batch: Any) -> WeightedLoss:
        """Forward one micro-batch; return its weighted loss."""

    @abstractmethod
    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        """Backward through a loss that is this rank's share of the global mean; `last` of a step."""

    @abstractmethod
    def _finish_step(self) -> StepResult:
        """Update with the accumulated gradients."""

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """One optimizer step over this rank's micro-batches."""
        count = len(micro_batches)
        for index, batch in enumerate(micro_batches, 1):
            loss = self._forward_loss(batch)
            self._normalizer.add(loss, micro_batches=count)
            self._begin_backward(self._normalizer.scaled(loss), last=index == count)
        return self._finish_step()

    # ---- for custom loops

    def __call__(self, batch: Any) -> Tensor:
        """Forward one micro-batch; return its mean loss."""
        if self._awaits_backward:
            raise TrainingError(
                "engine(batch) was called twice without engine.backward(loss) in between; "
                "engine.evaluate_micro_batch(batch) computes a loss without training on it"
            )
        if self._pending == self.accumulation:
            raise TrainingError(
                f"{self._pending} micro-batches are accumulated, as `accumulation` says: call engine.step() next"
            )
        loss = self._forward_loss(batch)
        self._normalizer.add(loss, micro_batches=self.accumulation)
        self._awaits_backward = True
        return loss.mean()

    def backward(self, loss: Tensor) -> None:
        """Backward through the loss of the forward pass just done."""
        if not self._awaits_backward:
            raise TrainingError("engine.backward(loss) was called without engine(batch) before it")
        self._awaits_backward = False
        self._pending += 1
        self._begin_backward(self._normalizer.scaled_mean(loss), last=self._pending == self.accumulation)

    def step(self) -> StepResult | None:
        """Update the weights when the accumulation is complete; None before that."""
        if self._pending == 0:
            raise TrainingError("engine.step() was called without engine.backward(loss) before it")
        if self._pending < self.accumulation:
            return None
        self._pending = 0
        return self._finish_step()

    @property
    def pending(self) -> int:
        """Micro-batches of a step that is not complete."""
        return self._pending + self._awaits_backward

    def request_stop(self) -> None:
        """Ask every rank to stop after the step in progress; the answer is in that step's result."""
        self._normalizer.flag = True


def ignore_phase(phase: Phase) -> None:
    """The default of `Engine.on_phase`: do nothing."""


def inputs_and_samples(batch: Any) -> tuple[Any, int]:
    """Return the inputs of a micro-batch and its number of samples; a plain batch counts as one."""
    return (batch.inputs, batch.samples) if type(batch) is MicroBatch else (batch, 1)
