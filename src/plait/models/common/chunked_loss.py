"""Linear layer and cross-entropy in one, over chunks of tokens.

[Note: chunked loss] The logits are the largest tensor of a language model: 16,384 tokens × 128,256 words are
8.4 GB in fp32, and their gradient is as large again. The chunked form goes over the tokens in pieces. The
gradient of a *sum* of losses with respect to a piece's logits is known as soon as the piece is (softmax minus
one-hot), so the forward finishes each piece's share of the gradients of `hidden` and `weight`, and the
backward only scales them by the incoming scalar. Scaling is done in fp32: rounding that scalar to bf16 would
scale every gradient of the model by the same error.

It is one operator to `torch.compile`. Traced into, the pieces would be reordered and all be held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.models.common.loss_kernel import is_fused, loss_and_slopes_triton
from plait.models.common.protocol import IGNORE_INDEX
from plait.ops import scaled, scaled_plain

LossAndSlopes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """Sum of the losses of `hidden` (tokens, dim), `rows` tokens at a time, products in `dtype`."""
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, *needed_of(hidden, weight))[0]
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


def needed_of(hidden: Tensor, weight: Tensor) -> tuple[bool, bool]:
    """Whether a gradient of `hidden` and one of `weight` will be asked for."""
    grad = torch.is_grad_enabled()
    return grad and hidden.requires_grad, grad and weight.requires_grad


def over_chunks(
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
    grad_hidden = room_for(hidden, hidden_grad, dtype)
    grad_weight: Tensor | None = None
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
            grad_weight = _add_product(grad_weight, slopes.t(), cast_hidden * counted)
        del losses, slopes  # or two chunks would be held
    if grad_weight is None:  # not needed, or nothing to learn from
        grad_weight = room_for(weight, weight_grad, torch.float32).zero_()
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
    return over_chunks(hidden, weight, labels, rows, dtype, (hidden_grad, weight_grad), loss_and_slopes)


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_answer(hidden, weight, dtype, needed)


def empty_answer(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """What `over_chunks` answers with, for tensors that have none."""
    total = hidden.new_empty((), dtype=torch.float32)
    return total, room_for(hidden, needed[0], dtype), room_for(weight, needed[1], torch.float32)


def room_for(tensor: Tensor, needed: bool, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient of `tensor`; empty where none is needed."""
    return torch.empty_like(tensor if needed else tensor[:0], dtype=dtype)


def keep_unscaled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what `over_chunks` has answered with; the inputs end with what was needed."""
    hidden, weight, *_, hidden_grad, weight_grad = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = hidden.dtype if hidden_grad else None, weight.dtype if weight_grad else None


def scale_kept(ctx: Any, grad_total: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `hidden` and `weight`, from those that were saved."""
    grads = (
        None if dtype is None or grad_total is None else times(grad, grad_total, dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return *grads, None, None, None, None, None


def times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, computed in fp32 and rounded once."""
    # On a CPU the plain form is what the operator would call; to call an operator of one's own takes a while.
    return (scaled if grad.is_cuda else scaled_plain)(grad, factor, dtype)


_forward.register_autograd(scale_kept, setup_context=keep_unscaled)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b` in fp32, in the place of `total` where there is one; within the product where the device can."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_(a @ b)
