"""The loss where each rank has some words of the vocabulary.

[Note: a loss over parts of the vocabulary] Where each rank has some words, a row's loss needs three numbers of all
ranks: the largest logit, the sum of exponentials, and the target's logit, which one rank has. Two all-reduces of
three fp32 numbers a row bring them together; no logit travels. Each rank then knows the gradient of its own logits.

Loaded by those who need it: keeping the compiler out loads the compiler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.models.common.chunked_loss import keep_unscaled, over_chunks, scale_kept, times
from plait.models.common.loss_kernel import is_fused, row_statistics_triton, slopes_triton
from plait.models.common.protocol import IGNORE_INDEX


class Words(NamedTuple):
    """A rank's part of the vocabulary."""

    start: int
    """Its first word."""
    most: int
    """How many words the rank with the most of them has. Chunks go by it: all ranks must cut alike."""
    group: dist.ProcessGroup
    """The ranks that have the others."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def split_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, words: Words
) -> Tensor:
    """`chunked_linear_cross_entropy` from this rank's rows of the weight; the gradient of `hidden` is its summand."""
    total: Tensor = _SplitLinear.apply(hidden, weight, labels, rows, dtype, words)  # type: ignore[no-untyped-call]
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def split_cross_entropy(logits: Tensor, labels: Tensor, words: Words, rows: int) -> Tensor:
    """Sum of the losses of this rank's logits (tokens, own words), looked at `rows` tokens at a time."""
    total: Tensor = _SplitLogits.apply(logits, labels, words, rows)  # type: ignore[no-untyped-call]
    return total


def split_loss_and_slopes(logits: Tensor, labels: Tensor, words: Words) -> tuple[Tensor, Tensor]:
    """`loss_and_slopes` of this rank's part of the logits; the losses are those of the whole.

    See [Note: a loss over parts of the vocabulary].
    """
    counted = labels != IGNORE_INDEX
    place = labels - words.start
    mine = counted & (place >= 0) & (place < logits.shape[1])
    place = place.where(mine, -1)
    fused = is_fused(logits)
    maxima, sums, targets = (row_statistics_triton if fused else row_statistics)(logits, place)
    top = maxima.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=words.group)
    summed = torch.stack([sums * (maxima - top).exp(), (targets - top).where(mine, 0.0)])
    dist.all_reduce(summed, group=words.group)
    log_sum, target = summed[0].log(), summed[1]
    slopes = (slopes_triton if fused else slopes_of)(logits, place, top + log_sum)
    return (log_sum - target).where(counted, 0.0), slopes


def row_statistics(logits: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, in fp32: the largest logit, the sum of exponentials relative to it, the logit at `place`."""
    wide = logits.float()
    maxima = wide.amax(1)
    sums = (wide - maxima[:, None]).exp_().sum(1)
    return maxima, sums, wide.gather(1, place.clamp(min=0)[:, None]).squeeze(1)


def slopes_of(logits: Tensor, place: Tensor, log_total: Tensor) -> Tensor:
    """Softmax, given the logarithm of its denominator, less one at `place`, where that is not negative."""
    wide = (logits.float() - log_total[:, None]).exp_()
    return wide.scatter_add_(1, place.clamp(min=0)[:, None], -(place >= 0).float()[:, None]).to(logits.dtype)


class _SplitLinear(torch.autograd.Function):
    """The chunked form over a part of the vocabulary. No operator: those take no process groups."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, words: Words
    ) -> Tensor:
        needed = ctx.needs_input_grad[:2]

        def evaluate(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return split_loss_and_slopes(logits, targets, words)

        output = over_chunks(hidden, weight, labels, rows, dtype, needed, evaluate)
        keep_unscaled(ctx, (hidden, weight, *needed), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        return scale_kept(ctx, grad_total)[:6]


class _SplitLogits(torch.autograd.Function):
    """Cross-entropy over a part of the vocabulary; keeps the gradient instead of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, words: Words, rows: int) -> Tensor:
        needed = ctx.needs_input_grad[0]
        slopes = torch.empty_like(logits if needed else logits[:0])
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, len(labels), rows):
            piece = slice(start, start + rows)
            # A copy: the caller's logits are not overwritten.
            losses, found = split_loss_and_slopes(logits[piece].clone(), labels[piece], words)
            total += losses.sum()
            if needed:
                torch.mul(found, (labels[piece] != IGNORE_INDEX)[:, None], out=slopes[piece])
            del losses, found  # or two chunks would be held
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return times(slopes, grad_total, slopes.dtype), None, None, None
