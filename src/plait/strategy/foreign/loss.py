"""The global mean, where another library owns the backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from plait.strategy.native.loss import LossNormalizer


class EvenNormalizer(LossNormalizer):
    """Divides by the count that a step has if all its micro-batches are like the first.

    Then nothing is left to correct for one micro-batch a step, or equal ones; the native engine can afford a power of
    two, since there a correction costs nothing.
    """

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        count = torch.as_tensor(weight, dtype=self._dtype, device=self._device).reshape(1).clone()
        if self._group is not None:
            dist.all_reduce(count, group=self._group)
        return max(float(count) * micro_batches, 1.0)
