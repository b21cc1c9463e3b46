"""The chunked loss whose two backward products are computed from 8-bit numbers.

[Note: a head in 8 bits] Logits are computed in 16 bits as always, so the loss is the same number. Of the three products
of a head it is the other two, which make the gradients of `hidden` and `weight`, that take numbers in 8 bits.

The gradient of a row of logits is softmax less one-hot. Most of it is one number, that of the right word, and to round
that one costs more than to round all others. So it is left out of the products, and what it makes is added in wide
numbers: a row of `weight` to a row of the one gradient, a row of `hidden` to a row of the other. What is left is
probabilities. They are e5m2, which has the range for them, with a fixed scale; `hidden` and `weight` are e4m3, scaled
by their largest number.

Products in 8 bits cannot add to what is there, and to add afterwards would move the weight's gradient three times for
each chunk. So the probabilities of several chunks wait, a byte each, and their share of the weight's gradient is one
product; only if there are more chunks than wait together is anything added. What waits takes twice the bytes of one
chunk's logits, however many tokens there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.models.common.chunked_loss import empty_answer, keep_unscaled, needed_of, room_for, scale_kept
from plait.models.common.fp8_loss_kernel import SCALE, write_others
from plait.models.common.loss_kernel import is_fused, row_statistics_triton
from plait.models.common.protocol import IGNORE_INDEX
from plait.ops import E4M3, E5M2, MULTIPLE, Cast, cast, peaks_of, scaled_product

WAITING = 4
"""So many chunks wait for one product: all of 16,384 tokens with 128,256 words."""


class Fp8Head(NamedTuple):
    """That a head computes its backward products in 8 bits."""

    emulated: bool
    """Rounded in the same way, multiplied in fp32: for devices without such products."""


def fp8_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, how: Fp8Head
) -> Tensor:
    """`chunked_linear_cross_entropy` with backward products in 8 bits; see [Note: a head in 8 bits].

    The features are a multiple of 16. So is the number of rows of a chunk: it is rounded down, to 16 at least.
    """
    rows = max(rows // MULTIPLE, 1) * MULTIPLE
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, how.emulated, *needed_of(hidden, weight))[0]
    return total


@torch.library.custom_op("plait::fp8_linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    dtype: torch.dtype,
    emulated: bool,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight_in = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    inverse = torch.full((), 1.0 / SCALE, dtype=torch.float32, device=hidden.device)
    grad_hidden = room_for(hidden, hidden_grad, dtype)
    grad_weight: Tensor | None = None
    turned = _turned(weight_in) if hidden_grad else None  # once, for all chunks
    for first in range(0, len(labels), rows * WAITING):
        part = slice(first, first + rows * WAITING)
        x, targets, grads = hidden[part].to(dtype), labels[part], grad_hidden[part]
        places = targets.clamp(min=0)  # IGNORE_INDEX is negative
        slopes = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        tokens = len(targets) + -len(targets) % MULTIPLE
        waiting = weight.new_empty((len(weight), tokens), dtype=E5M2) if weight_grad else None
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            columns = None if waiting is None else waiting[:, start : min(start + rows, tokens)]
            losses, others = _chunk(x[piece] @ weight_in.t(), targets[piece], slopes[piece], columns, hidden_grad)
            total += losses.sum()
            if turned is not None:
                inverses, b = (inverse, turned.inverse), turned.columns.t()
                found = scaled_product(others, b, inverses, dtype, fast=False, emulated=emulated)
                torch.addcmul(found, slopes[piece, None], weight_in[places[piece]], out=grads[piece])
            del others  # or two chunks would be held
        if waiting is not None:
            small = _turned(x)
            inverses, b = (inverse, small.inverse), small.columns.t()
            product = scaled_product(waiting, b, inverses, torch.float32, fast=False, emulated=emulated)
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del waiting, product  # before more is asked for
            grad_weight.index_add_(0, places, x * slopes[:, None])
    if grad_weight is None:  # not needed, or nothing to learn from
        grad_weight = room_for(weight, weight_grad, torch.float32).zero_()
    return total, grad_hidden, grad_weight


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, emulated: bool, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_answer(hidden, weight, dtype, needed)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return *scale_kept(ctx, *grads), None


_forward.register_autograd(_backward, setup_context=keep_unscaled)


def _chunk(
    logits: Tensor, labels: Tensor, slopes: Tensor, columns: Tensor | None, hidden_grad: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the other words' probabilities in 8 bits; turned over, they are put into `columns`.

    `slopes` are given the gradients of the labels' logits. Who wants no `hidden_grad` gets an empty matrix.
    """
    counted = labels != IGNORE_INDEX
    place = labels.where(counted, -1)
    if is_fused(logits):
        maxima, sums, targets = row_statistics_triton(logits, place)
        log_totals = maxima + sums.log()
    else:
        wide = logits.float()
        log_totals, targets = wide.logsumexp(1), wide.gather(1, place.clamp(min=0)[:, None]).squeeze(1)
    losses = log_totals - targets
    slopes.copy_(torch.expm1(-losses).where(counted, 0.0))
    words = logits.shape[1]
    others = logits.new_empty((len(logits), words + -words % MULTIPLE) if hidden_grad else 0, dtype=E5M2)
    if hidden_grad or columns is not None:
        write_others(logits, place, log_totals, others if hidden_grad else None, columns)
    return losses.where(counted, 0.0), others


def _turned(x: Tensor) -> Cast:
    return cast([x], peaks_of([x]), E4M3, rows=False, columns=True)
