"""The global mean, where another library owns the backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from plait.strategy.native.loss import LossNormalizer, Sums


class EvenNormalizer(LossNormalizer):
    """Divides by the count that a step has if all its micro-batches are like the first.

    Then nothing is left to correct for one micro-batch a step, or equal ones; the native engine can afford a power of
    two, since there a correction costs nothing.
    """

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        return max(self._count(weight) * micro_batches, 1.0)

    def _count(self, weight: Tensor | float) -> float:
        """What one micro-batch of every rank counts."""
        count = torch.as_tensor(weight, dtype=self._dtype, device=self._device).reshape(1).clone()
        if self._group is not None:
            dist.all_reduce(count, group=self._group)
        return float(count)


class StepNormalizer(EvenNormalizer):
    """Divides by the count of each step, which ranks agree on before its backward pass.

    For a library whose gradients cannot be corrected afterwards, and which takes one micro-batch a step.
    """

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        assert micro_batches == 1
        return self._count(weight) or 1.0

    def finish(self) -> Sums:
        """What the step's loss adds up to; the next one has a count of its own."""
        sums = super().finish()
        self._divisor = None
        return sums
