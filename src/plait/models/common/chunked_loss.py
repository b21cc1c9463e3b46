"""Linear layer and cross-entropy in one, over chunks of tokens.

[Note: chunked loss] The logits are the largest tensor of a language model: 16,384 tokens × 128,256 words are
8.4 GB in fp32, and their gradient is as large again. The chunked form goes over the tokens in pieces. The
gradient of a *sum* of losses with respect to a piece's logits is known as soon as the piece is (softmax minus
one-hot), so the forward finishes each piece's share of the gradients of `hidden` and `weight`, and the
backward only scales them by the incoming scalar. Scaling is done in fp32: rounding that scalar to bf16 would
scale every gradient of the model by the same error.

It is one operator to `torch.compile`. Traced into, the pieces would be reordered and all be held at once.

[Note: a loss over parts of the vocabulary] Where each rank has some words, a row's loss needs three numbers of all
ranks: the largest logit, the sum of exponentials, and the target's logit, which one rank has. Two all-reduces of
three fp32 numbers a row bring them together; no logit travels. Each rank then knows the gradient of its own logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.models.common.loss_kernel import (
    is_fused,
    loss_and_slopes_triton,
    row_statistics_triton,
    slopes_triton,
)
from plait.models.common.protocol import IGNORE_INDEX

LossAndSlopes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Words(NamedTuple):
    """A rank's part of the vocabulary."""

    start: int
    """Its first word."""
    most: int
    """How many words the rank with the most of them has. Chunks go by it: all ranks must cut alike."""
    group: dist.ProcessGroup
    """The ranks that have the others."""


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """Sum of the losses of `hidden` (tokens, dim), `rows` tokens at a time, products in `dtype`."""
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, *_needed(hidden, weight))[0]
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def split_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, words: Words
) -> Tensor:
    """The same, from this rank's rows of the weight. The gradient of `hidden` is this rank's summand."""
    total: Tensor = _SplitLinear.apply(hidden, weight, labels, rows, dtype, words)  # type: ignore[no-untyped-call]
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def split_cross_entropy(logits: Tensor, labels: Tensor, words: Words, rows: int) -> Tensor:
    """Sum of the losses of this rank's logits (tokens, own words), looked at `rows` tokens at a time."""
    total: Tensor = _SplitLogits.apply(logits, labels, words, rows)  # type: ignore[no-untyped-call]
    return total


def loss_and_slopes(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, fp32, and its gradient with respect to the logits, in their dtype.

    The gradient of an ignored row is left as if it counted for label 0. Overwrites `logits` where it can.
    """
    if is_fused(logits):
        return loss_and_slopes_triton(logits, labels)
    counted = labels != IGNORE_INDEX
    index = labels.where(counted, 0)[:, None]
    log_probs = logits.float().log_softmax(-1)
    losses = -log_probs.gather(1, index).squeeze(1).where(counted, 0.0)
    slopes = log_probs.exp_().scatter_add_(1, index, log_probs.new_full(index.shape, -1.0))
    return losses, slopes.to(logits.dtype)


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


def _needed(hidden: Tensor, weight: Tensor) -> tuple[bool, bool]:
    grad = torch.is_grad_enabled()
    return grad and hidden.requires_grad, grad and weight.requires_grad


def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    dtype: torch.dtype,
    needed: tuple[bool, bool],
    evaluate: LossAndSlopes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and the unscaled gradients; empty where one is not needed."""
    hidden_grad, weight_grad = needed
    cast_weight = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden if hidden_grad else hidden[:0], dtype=dtype)
    grad_weight = torch.zeros_like(weight if weight_grad else weight[:0], dtype=torch.float32)
    for start in range(0, len(labels), rows):
        piece = slice(start, start + rows)
        cast_hidden = hidden[piece].to(dtype)
        losses, slopes = evaluate(cast_hidden @ cast_weight.t(), labels[piece])
        total += losses.sum()
        # Ignored rows are struck out of the small factors, which spares a pass over the large one.
        counted = (labels[piece] != IGNORE_INDEX)[:, None]
        if hidden_grad:
            torch.mm(slopes, cast_weight, out=grad_hidden[piece]).mul_(counted)
        if weight_grad:
            _add_product(grad_weight, slopes.t(), cast_hidden * counted)
    return total, grad_hidden, grad_weight


@torch.library.custom_op("plait::chunked_linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _over_chunks(hidden, weight, labels, rows, dtype, (hidden_grad, weight_grad), loss_and_slopes)


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden.new_empty((), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden if hidden_grad else hidden[:0], dtype=dtype)
    grad_weight = torch.empty_like(weight if weight_grad else weight[:0], dtype=torch.float32)
    return total, grad_hidden, grad_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, *_, hidden_grad, weight_grad = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = hidden.dtype if hidden_grad else None, weight.dtype if weight_grad else None


def _scale(ctx: Any, grad_total: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    scaled = (
        None if dtype is None or grad_total is None else _times(grad, grad_total, dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return *scaled, None, None, None, None, None


def _times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, computed in fp32 and rounded once."""
    if grad.dtype == torch.float32 and dtype != torch.float32:
        # Rounded while it is written: the weight's gradient is large, and a wide product of it as large again.
        return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
    return (grad.float() * factor).to(dtype)


_forward.register_autograd(_scale, setup_context=_keep)


class _SplitLinear(torch.autograd.Function):
    """The chunked form over a part of the vocabulary. No operator: those take no process groups."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, words: Words
    ) -> Tensor:
        needed = ctx.needs_input_grad[:2]

        def evaluate(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return split_loss_and_slopes(logits, targets, words)

        output = _over_chunks(hidden, weight, labels, rows, dtype, needed, evaluate)
        _keep(ctx, (hidden, weight, *needed), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        return _scale(ctx, grad_total)[:6]


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
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes.float() * grad_total).to(slopes.dtype), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in fp32: within the product itself where the device can."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
