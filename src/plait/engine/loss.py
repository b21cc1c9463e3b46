"""Read a loss from a model's outputs, and normalize it by the number of targets of the step, over all ranks.

A target is what a loss is summed over: a token with a label, or a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config import RunConfig
from plait.errors import ModelError
from plait.models import LossTerm
from plait.plugins import load_function

LossFunction = Callable[[Any, Any], Any]
"""(the model's outputs, the micro-batch) → a scalar, a `LossTerm`, or a mapping with `loss`."""


def configured_loss(config: RunConfig) -> LossFunction | None:
    """Return the function that `train.loss` names; None if the model returns its loss itself."""
    return None if config.train.loss is None else load_function(config.train.loss, "train.loss", "outputs", "batch")


class WeightedLoss(NamedTuple):
    """The loss of a micro-batch: a sum over `weight` targets, or (`is_mean`) their mean."""

    value: Tensor
    weight: Tensor | float
    is_mean: bool

    def mean(self) -> Tensor:
        """Return the mean over the targets of this micro-batch."""
        if self.is_mean:
            return self.value
        # Without any target the loss is zero, not 0 / 0.
        weight = self.weight
        return self.value / (torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1.0)

    def total(self) -> Tensor:
        """Return the sum over the targets of this micro-batch."""
        return self.value * self.weight if self.is_mean else self.value


def read_loss(outputs: Any, inputs: Any, samples: float, loss_function: LossFunction | None) -> WeightedLoss:
    """Return the weighted loss of a micro-batch, read from the model's outputs.

    A `LossTerm` is a sum with its count. A scalar is a mean, weighted by the number of samples in the micro-batch. A
    micro-batch with `samples` 0 is a filler, which only completes a pipeline step: its loss is multiplied by zero, but
    not detached, so that its backward pass runs the same collectives. Raises `ModelError` if the outputs hold no loss.
    """
    result = outputs if loss_function is None else loss_function(outputs, inputs)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise ModelError(
                f"the model returned a mapping with the keys {sorted(map(str, result))}, but no 'loss'; "
                "add it, or give a loss_fn"
            )
        result = result["loss"]
    elif not isinstance(result, LossTerm | Tensor) and isinstance(getattr(result, "loss", None), Tensor):
        result = result.loss
    value = result.sum if isinstance(result, LossTerm) else result
    if isinstance(value, Tensor) and value.ndim == 0:
        if value.dtype in (torch.float16, torch.bfloat16):
            value = value.float()  # a scaled fp16 loss would overflow before any gradient does
        if samples == 0:
            return WeightedLoss(value * 0.0, 0.0, is_mean=False)
        if isinstance(result, LossTerm):
            return WeightedLoss(value, result.count, is_mean=False)
        return WeightedLoss(value, float(samples), is_mean=True)
    result = value
    shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise ModelError(
        f"the model returned {shape} where a loss was expected: return a scalar, a LossTerm(sum, count) or a "
        "mapping with 'loss', or give a loss_fn(outputs, batch)"
    )


class StepLoss(NamedTuple):
    """A step's loss, summed over all micro-batches and ranks; as tensors that the device may still compute."""

    total: Tensor
    """The sum of the loss over all targets; if `divisor` is None, their mean."""
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count
    flag: Tensor | bool
    """Nonzero if some rank has set `LossNormalizer.flag`."""
    divisor: float | None
    """The number that the gradients were divided by; None if it was the exact number of targets."""
    local_mean: Tensor | None = None
    """If set, the mean over this rank only, reported instead of the global one. It is not used to decide whether to
    skip the step, since ranks have different values."""

    def mean(self) -> Tensor:
        """Return the mean loss."""
        if self.local_mean is not None:
            return self.local_mean
        return self.total if self.divisor is None else self.total / self._nonzero_count()

    def correction(self) -> Tensor | float:
        """Return the factor by which the gradients must be multiplied in the update: `divisor / count`."""
        return 1.0 if self.divisor is None else self.divisor / self._nonzero_count()

    def _nonzero_count(self) -> Tensor:
        assert isinstance(self.count, Tensor)
        # Without any target, loss and gradients are zero, whatever they are divided by.
        return torch.where(self.count > 0, self.count, 1.0)

    def read(self) -> tuple[float, float, bool]:
        """Return the mean loss, the number of targets, and the flag. Waits for the device."""
        count = float(self.count)
        if self.local_mean is not None or self.divisor is None:
            return float(self.mean()), count, bool(self.flag)
        return float(self.total) / (count or 1.0), count, bool(self.flag)


class LossNormalizer:
    """Divides losses by the step's number of targets, over all micro-batches and ranks.

    [Note: dividing before the count is known]
    The number of targets of a step (the count) is known after the last forward pass, when most backward passes are
    done. So losses are divided by a power of two near the count, which costs no precision, and the update multiplies
    the gradients by the exact remaining factor (`StepLoss.correction`). With one process and one micro-batch the count
    is known before the backward pass, and no correction is needed. The all-reduce of the counts overlaps with the last
    backward pass.

    In fp16, which gradients overflow depends on the divisor. So there each step uses the power of two near the count of
    the previous step, which is the same in every layout and is saved in checkpoints; only the first step of a run uses
    an estimate from its first micro-batch.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, counts: bool = True) -> None:
        """`counts`: whether this rank's losses are added to the sum; false if another rank computes the same ones."""
        self._group = group
        self._counts = counts
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._divisor: float | None = None
        self._losses: list[WeightedLoss] = []
        self._box: Tensor | None = None
        self._work: dist.Work | None = None
        self._exact = False
        self.flag = False
        """If set on any rank, `finish` returns it on every rank: it is all-reduced with the loss."""

    def add(self, loss: WeightedLoss, *, micro_batches: int) -> None:
        """Add the loss of one of `micro_batches` micro-batches, before its backward pass; the last starts the sum."""
        self._exact = micro_batches == 1 and self._group is None
        if self._divisor is None and not self._exact:
            self._divisor = self._choose_divisor(loss.weight, micro_batches)
        self._losses.append(WeightedLoss(loss.value.detach(), loss.weight, loss.is_mean))
        if len(self._losses) == micro_batches and not self._exact:
            self._start_sum()

    @property
    def divisor(self) -> float | None:
        """The number that losses are divided by; None if that is not chosen yet, or the exact count is used."""
        return self._divisor

    def expect(self, count: float) -> None:
        """Choose the divisor of the first step from an estimate of each rank's number of targets.

        For pipelines, where ranks without the last stage have no losses to count. Every rank must call it.
        """
        if self._divisor is None:
            self._divisor = self._choose_divisor(count, 1)

    def learn(self, count: float) -> None:
        """Set the divisor of the next step to the power of two nearest to `count`, this step's number of targets."""
        if count > 0:
            self._divisor = _power_of_two(count)

    def add_nothing(self) -> None:
        """Start the all-reduce of the step's losses on a rank that has none."""
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        self._sum(zero, zero)

    def scaled(self, loss: WeightedLoss) -> Tensor:
        """Return the normalized loss of a micro-batch: the tensor to call backward on."""
        if self._exact:
            return loss.mean()
        assert self._divisor is not None
        return loss.value * (loss.weight / self._divisor if loss.is_mean else 1.0 / self._divisor)

    def scaled_mean(self, mean: Tensor) -> Tensor:
        """Return the normalized loss, to call backward on, for a mean over the micro-batch that was added last."""
        return self.scaled(WeightedLoss(mean, self._losses[-1].weight, is_mean=True))

    def finish(self) -> StepLoss:
        """Return the step's loss, summed over all micro-batches and ranks, and begin the next step."""
        losses, self._losses = self._losses, []
        if self._exact:
            flag, self.flag = self.flag, False
            return StepLoss(losses[0].mean(), losses[0].weight, flag, divisor=None)
        assert self._box is not None
        if self._work is not None:
            self._work.wait()
        box, self._box, self._work = self._box, None, None
        return StepLoss(box[0], box[1], box[2], divisor=self._divisor)

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        mine = weight if self._counts else 0.0
        count = torch.zeros(1, dtype=self._dtype, device=self._device).add_(mine)
        if self._group is not None:
            dist.all_reduce(count, group=self._group)
        return _power_of_two(float(count) * micro_batches)

    def _start_sum(self) -> None:
        total: Any = 0.0
        count: Any = 0.0
        for loss in self._losses:
            total = total + loss.total().to(self._dtype)
            count = count + loss.weight
        # `full_like` runs on the device; a copy from host memory would make the host wait for the device.
        known = not isinstance(count, Tensor)
        self._sum(total, torch.full_like(total, count) if known else count.to(total.device, self._dtype))

    def _sum(self, total: Tensor, count: Tensor) -> None:
        flag = torch.full((), float(self.flag), dtype=self._dtype, device=total.device)
        self.flag = False  # set after this, it is all-reduced with the next step
        self._box = torch.stack((total, count, flag)) if self._counts else torch.stack((total * 0, count * 0, flag))
        if self._group is not None:
            self._work = dist.all_reduce(self._box, group=self._group, async_op=True)


def _power_of_two(count: float) -> float:
    """Return the power of two nearest to `count`, at least 1."""
    return float(2.0 ** round(math.log2(max(count, 1.0))))
