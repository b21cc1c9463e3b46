"""Read a weighted loss from a model's outputs, and normalize it by the global number of targets."""

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


def configured_loss(config: RunConfig) -> LossFunction | None:
    """Return the function that `train.loss` names; None if the model returns its loss itself."""
    return None if config.train.loss is None else load_function(config.train.loss, "train.loss", "outputs", "batch")


class WeightedLoss(NamedTuple):
    """A loss and its weight: a sum over `weight` targets, or a mean with the weight `weight`."""

    value: Tensor
    weight: Tensor | float
    is_mean: bool

    def mean(self) -> Tensor:
        """Return the mean over this micro-batch."""
        if self.is_mean:
            return self.value
        # Without any target the loss is zero, not 0 / 0.
        weight = self.weight
        return self.value / (torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1.0)

    def total(self) -> Tensor:
        """Return the sum over this micro-batch."""
        return self.value * self.weight if self.is_mean else self.value


def read_loss(outputs: Any, inputs: Any, samples: float, loss_function: LossFunction | None) -> WeightedLoss:
    """Return the weighted loss of a micro-batch, read from the model's outputs.

    A `LossTerm` is a sum with its count. A scalar is a mean, weighted by the number of samples in the micro-batch. A
    filler (no samples) has weight zero, but keeps its graph, so that its backward pass takes part in every collective.
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
    """A step's loss over all micro-batches and ranks; possibly still being computed on the device."""

    total: Tensor
    """The sum of the loss; without a divisor, its mean."""
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count
    flag: Tensor | bool
    """Whether some rank has set `LossNormalizer.flag`."""
    divisor: float | None
    """What the gradients were divided by; None if that was the count itself."""
    local_mean: Tensor | None = None
    """This rank's mean, reported instead of the global one. It decides nothing, since ranks have different ones."""

    def mean(self) -> Tensor:
        """Return the mean loss."""
        if self.local_mean is not None:
            return self.local_mean
        return self.total if self.divisor is None else self.total / self._nonzero_count()

    def correction(self) -> Tensor | float:
        """Return the factor that the gradients must still be multiplied by."""
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
    """Divides by the number of targets over all micro-batches and ranks.

    [Note: dividing before the count is known]
    The count is known after the last forward pass, when most backward passes are over. So losses are divided by a power
    of two near the count, which costs no precision, and the optimizer applies the exact remaining factor
    (`correction`). With one process and one micro-batch the count is known, and no correction is needed. The all-reduce
    of the counts overlaps with the last backward pass.

    In fp16 the divisor still decides which gradients overflow. So there each step uses the power of two near the count
    of the step before, which is the same in every layout and is saved; only the first step of a run uses an estimate.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, counts: bool = True) -> None:
        """`counts`: whether this rank's losses are summed; not if another rank has the same ones."""
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
        """Add one micro-batch's loss, before its backward pass."""
        self._exact = micro_batches == 1 and self._group is None
        if self._divisor is None and not self._exact:
            self._divisor = self._choose_divisor(loss.weight, micro_batches)
        self._losses.append(WeightedLoss(loss.value.detach(), loss.weight, loss.is_mean))
        if len(self._losses) == micro_batches and not self._exact:
            self._start_sum()

    @property
    def divisor(self) -> float | None:
        """What gradients are divided by before the count is known; None if the count was known."""
        return self._divisor

    def expect(self, count: float) -> None:
        """Estimate this rank's targets per step, for ranks that may see no loss. Every rank must call it."""
        if self._divisor is None:
            self._divisor = self._choose_divisor(count, 1)

    def learn(self, count: float) -> None:
        """Divide the next step by about as many targets as there were in this one."""
        if count > 0:
            self._divisor = _power_of_two(count)

    def add_nothing(self) -> None:
        """Take part in the all-reduce of a step whose losses other ranks have."""
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        self._sum(zero, zero)

    def scaled(self, loss: WeightedLoss) -> Tensor:
        """Return the loss of a micro-batch to call backward on."""
        if self._exact:
            return loss.mean()
        assert self._divisor is not None
        return loss.value * (loss.weight / self._divisor if loss.is_mean else 1.0 / self._divisor)

    def scaled_mean(self, mean: Tensor) -> Tensor:
        """Return the loss to call backward on, from the mean of the micro-batch that was added last."""
        return self.scaled(WeightedLoss(mean, self._losses[-1].weight, is_mean=True))

    def finish(self) -> StepLoss:
        """Return the step's loss, summed over all micro-batches and ranks."""
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
        # A number is filled in, not copied from the host: a copy would wait for the device.
        known = not isinstance(count, Tensor)
        self._sum(total, torch.full_like(total, count) if known else count.to(total.device, self._dtype))

    def _sum(self, total: Tensor, count: Tensor) -> None:
        flag = torch.full((), float(self.flag), dtype=self._dtype, device=total.device)
        self.flag = False  # if set from now on, it belongs to the next step
        self._box = torch.stack((total, count, flag)) if self._counts else torch.stack((total * 0, count * 0, flag))
        if self._group is not None:
            self._work = dist.all_reduce(self._box, group=self._group, async_op=True)


def _power_of_two(count: float) -> float:
    """Return the nearest power of two."""
    return float(2.0 ** round(math.log2(max(count, 1.0))))
