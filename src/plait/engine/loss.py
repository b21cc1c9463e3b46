"""From whatever a model returns to a loss with a weight, and from that to a global mean."""

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
from plait.plugins import function

LossFunction = Callable[[Any, Any], Any]


def described_loss(config: RunConfig) -> LossFunction | None:
    """The function that `train.loss` names; None where the model's local_mean result is learned."""
    return None if config.train.loss is None else function(config.train.loss, "train.loss", "outputs", "batch")


class WeightedLoss(NamedTuple):
    """A loss and its weight: a sum over `weight` targets, or a mean that counts `weight` times."""

    value: Tensor
    weight: Tensor | float
    is_mean: bool

    def mean(self) -> Tensor:
        """The mean over this micro-batch."""
        if self.is_mean:
            return self.value
        # No target at all: a loss of zero, not zero by zero.
        weight = self.weight
        return self.value / (torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1.0)

    def total(self) -> Tensor:
        """The sum over this micro-batch."""
        return self.value * self.weight if self.is_mean else self.value


def read_loss(outputs: Any, inputs: Any, samples: float, loss_function: LossFunction | None) -> WeightedLoss:
    """Find the loss in a model's output.

    A `LossTerm` is a sum with its count. A scalar is a mean, and counts as often as the micro-batch has
    samples. A filler (no samples) counts for nothing, but keeps its graph, so that its backward pass takes
    part in every collective.
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
    """A step's loss over all micro-batches and ranks; perhaps still on its way from the device."""

    total: Tensor
    """The sum of the loss; without a divisor, its mean."""
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count
    flag: Tensor | bool
    """Whether some rank has set `LossNormalizer.flag`."""
    divisor: float | None
    """What the gradients were divided by; None where that was the count itself."""
    local_mean: Tensor | None = None
    """This rank's mean, told instead of the common one. It decides nothing: other ranks have another."""

    def mean(self) -> Tensor:
        """The mean loss."""
        if self.local_mean is not None:
            return self.local_mean
        return self.total if self.divisor is None else self.total / self._some_count()

    def correction(self) -> Tensor | float:
        """What the gradients are still to be multiplied by."""
        return 1.0 if self.divisor is None else self.divisor / self._some_count()

    def _some_count(self) -> Tensor:
        assert isinstance(self.count, Tensor)
        # No target at all: loss and gradients are zero, whatever they are divided by.
        return torch.where(self.count > 0, self.count, 1.0)

    def read(self) -> tuple[float, float, bool]:
        """The mean loss, the number of targets, and the flag. Waits for the device."""
        count = float(self.count)
        if self.local_mean is not None or self.divisor is None:
            return float(self.mean()), count, bool(self.flag)
        return float(self.total) / (count or 1.0), count, bool(self.flag)


class LossNormalizer:
    """Divides by the number of targets over all micro-batches and ranks.

    [Note: dividing before the count is known]
    The count is known after the last forward pass; most backward passes are over by then. So they are divided
    by a power of two near the count, which costs no precision, and the optimizer is told the exact rest
    (`correction`). With one process and one micro-batch the count is known, and nothing is left to correct.
    The sum over ranks is on its way while the last backward pass runs.

    In fp16 it still decides which gradients overflow. So there each step has the power of two near the count of the
    step before, which is the same in every layout and goes into checkpoints; only the first of a run has a guess.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, counts: bool = True) -> None:
        """`counts`: whether this rank's losses count; not where another rank has the same ones."""
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
        """Set on any rank, it comes back from `finish` on every rank: it travels with the loss."""

    def add(self, loss: WeightedLoss, *, micro_batches: int) -> None:
        """Take note of one micro-batch's loss, before its backward pass."""
        self._exact = micro_batches == 1 and self._group is None
        if self._divisor is None and not self._exact:
            self._divisor = self._choose_divisor(loss.weight, micro_batches)
        self._losses.append(WeightedLoss(loss.value.detach(), loss.weight, loss.is_mean))
        if len(self._losses) == micro_batches and not self._exact:
            self._start_sum()

    @property
    def divisor(self) -> float | None:
        """What gradients are divided by before the count is known; None where nobody had to choose."""
        return self._divisor

    def expect(self, count: float) -> None:
        """Take a guess at this rank's targets of a step, where it may not see any. Every rank must do so."""
        if self._divisor is None:
            self._divisor = self._choose_divisor(count, 1)

    def learn(self, count: float) -> None:
        """Divide the next step by about as many targets as there were in this one, however the guess came about."""
        if count > 0:
            self._divisor = _power_of_two(count)

    def add_nothing(self) -> None:
        """Take part in a step whose losses other ranks have."""
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        self._sum(zero, zero)

    def scaled(self, loss: WeightedLoss) -> Tensor:
        """The loss of a micro-batch divided as its backward pass needs it."""
        if self._exact:
            return loss.mean()
        assert self._divisor is not None
        return loss.value * (loss.weight / self._divisor if loss.is_mean else 1.0 / self._divisor)

    def scaled_mean(self, mean: Tensor) -> Tensor:
        """What to call backward on, given the mean of the micro-batch that was added last."""
        return self.scaled(WeightedLoss(mean, self._losses[-1].weight, is_mean=True))

    def finish(self) -> StepLoss:
        """What the step's loss adds up to, over all micro-batches and ranks."""
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
        # A number is filled in, not copied from the host: the device would have to be waited for.
        known = not isinstance(count, Tensor)
        self._sum(total, torch.full_like(total, count) if known else count.to(total.device, self._dtype))

    def _sum(self, total: Tensor, count: Tensor) -> None:
        flag = torch.full((), float(self.flag), dtype=self._dtype, device=total.device)
        self.flag = False  # it is on its way; set from now on, it is meant for the next step
        self._box = torch.stack((total, count, flag)) if self._counts else torch.stack((total * 0, count * 0, flag))
        if self._group is not None:
            self._work = dist.all_reduce(self._box, group=self._group, async_op=True)


def _power_of_two(count: float) -> float:
    """The nearest one."""
    return float(2.0 ** round(math.log2(max(count, 1.0))))
