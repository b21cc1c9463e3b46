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

from typing import Any

import torch
from torch import Tensor

from plait.models.common.loss_kernel import HAS_TRITON, loss_and_slopes_triton
from plait.models.common.protocol import IGNORE_INDEX


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """Sum of the losses of `hidden` (tokens, dim), `rows` tokens at a time, products in `dtype`."""
    grad = torch.is_grad_enabled()
    needed = grad and hidden.requires_grad, grad and weight.requires_grad
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, *needed)[0]
    return total


def loss_and_slopes(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, fp32, and its gradient with respect to the logits, in their dtype.

    The gradient of an ignored row is left as if it counted for label 0. Overwrites `logits` where it can.
    """
    if logits.is_cuda and HAS_TRITON:
        return loss_and_slopes_triton(logits, labels)
    counted = labels != IGNORE_INDEX
    index = labels.where(counted, 0)[:, None]
    log_probs = logits.float().log_softmax(-1)
    losses = -log_probs.gather(1, index).squeeze(1).where(counted, 0.0)
    slopes = log_probs.exp_().scatter_add_(1, index, log_probs.new_full(index.shape, -1.0))
    return losses, slopes.to(logits.dtype)


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
    """The summed loss and the unscaled gradients; empty where one is not needed."""
    cast_weight = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden if hidden_grad else hidden[:0], dtype=dtype)
    grad_weight = torch.zeros_like(weight if weight_grad else weight[:0], dtype=torch.float32)
    for start in range(0, len(labels), rows):
        piece = slice(start, start + rows)
        cast_hidden = hidden[piece].to(dtype)
        losses, slopes = loss_and_slopes(cast_hidden @ cast_weight.t(), labels[piece])
        total += losses.sum()
        # Ignored rows are struck out of the small factors, which spares a pass over the large one.
        counted = (labels[piece] != IGNORE_INDEX)[:, None]
        if hidden_grad:
            torch.mm(slopes, cast_weight, out=grad_hidden[piece]).mul_(counted)
        if weight_grad:
            _add_product(grad_weight, slopes.t(), cast_hidden * counted)
    return total, grad_hidden, grad_weight


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
        None if dtype is None or grad_total is None else (grad.float() * grad_total).to(dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return *scaled, None, None, None, None, None


_forward.register_autograd(_scale, setup_context=_keep)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in fp32: within the product itself where the device can."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
