"""Cross-entropy as (sum, count): from logits, or from hidden states without computing all logits at once.

Logits or the head's weight may be DTensors that are sharded over the vocabulary; see [Note: a loss over a sharded
vocabulary]. Each rank then computes only its own term of the gradient with respect to the hidden states: the caller has
to add up the terms of all ranks (all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.distributed import is_sharded
from plait.kernels import (
    E4M3,
    E5M2,
    MULTIPLE,
    PROB_SCALE,
    Fp8Matrix,
    amax_of,
    fp8_cast,
    has_loss_kernels,
    loss_and_grads_triton,
    row_statistics_triton,
    scaled,
    scaled_plain,
    scaled_product,
    write_fp8_probs,
)
from plait.models.common.protocol import IGNORE_INDEX, LossTerm

# The head (a linear layer) and the cross-entropy as one operation, over chunks of tokens.
#
# [Note: chunked loss] The logits are the largest tensor of a language model: 16,384 tokens × 128,256 words take 8.4 GB
# in fp32, and their gradient takes as much again. Here they are computed for one chunk of tokens at a time. The
# gradient of the *sum* of the losses with respect to a chunk's logits is softmax minus one-hot, which is known as soon
# as the logits are. So the forward pass also computes each chunk's contribution to the gradients of `hidden` and
# `weight`, and the backward pass only scales these gradients by the gradient of the sum, a scalar. They are scaled in
# fp32: if the scalar were rounded to bf16, every gradient of the model would have the same relative error.
#
# `torch.compile` sees a single operator. If it traced into the loop, it could reorder the chunks and keep all at once.
#
# torch's own `F.linear_cross_entropy` is not used, for the reasons in `plait.kernels.registry`.


LossAndGrads = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the losses for `hidden` (tokens, dim), `rows` tokens at a time, multiplied in `dtype`."""
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, *needed_grads(hidden, weight))[0]
    return total


def loss_and_grads(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, fp32, and its gradient with respect to the logits, in their dtype.

    The gradient of a row with an ignored label is that for label 0; the caller zeroes it. Kernels overwrite `logits`.
    """
    if has_loss_kernels(logits):
        return loss_and_grads_triton(logits, labels, IGNORE_INDEX)
    counted = labels != IGNORE_INDEX
    index = labels.where(counted, 0)[:, None]
    log_probs = logits.float().log_softmax(-1)
    losses = -log_probs.gather(1, index).squeeze(1).where(counted, 0.0)
    grads = log_probs.exp_().scatter_add_(1, index, log_probs.new_full(index.shape, -1.0))
    return losses, grads.to(logits.dtype)


def needed_grads(hidden: Tensor, weight: Tensor) -> tuple[bool, bool]:
    """Return whether `hidden` and whether `weight` need gradients."""
    grad = torch.is_grad_enabled()
    return grad and hidden.requires_grad, grad and weight.requires_grad


def over_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    dtype: torch.dtype,
    needed: tuple[bool, bool],
    evaluate: LossAndGrads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, and its gradients for `hidden` and `weight`; one that is not `needed` has no elements.

    `evaluate` returns the losses of some rows of logits, and the gradient of their sum with respect to the logits.
    """
    hidden_grad, weight_grad = needed
    cast_weight = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = empty_grad(hidden, hidden_grad, dtype)
    grad_weight: Tensor | None = None
    for start in range(0, len(labels), rows):
        piece = slice(start, start + rows)
        cast_hidden = hidden[piece].to(dtype)
        losses, grads = evaluate(cast_hidden @ cast_weight.t(), labels[piece])
        total += losses.sum()
        # Ignored rows are zeroed in the smaller matrices, so that the large one need not be written again.
        counted = (labels[piece] != IGNORE_INDEX)[:, None]
        if hidden_grad:
            torch.mm(grads, cast_weight, out=grad_hidden[piece]).mul_(counted)
        if weight_grad:
            grad_weight = _add_product(grad_weight, grads.t(), cast_hidden * counted)
        del losses, grads  # else two chunks would be in memory at the same time
    if grad_weight is None:  # not needed, or no tokens
        grad_weight = empty_grad(weight, weight_grad, torch.float32).zero_()
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
    return over_chunks(hidden, weight, labels, rows, dtype, (hidden_grad, weight_grad), loss_and_grads)


@_forward.register_fake
def _forward_fake(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(hidden, weight, dtype, needed)


def empty_results(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors with the shapes and dtypes of the results of `over_chunks`."""
    total = hidden.new_empty((), dtype=torch.float32)
    return total, empty_grad(hidden, needed[0], dtype), empty_grad(weight, needed[1], torch.float32)


def empty_grad(tensor: Tensor, needed: bool, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized gradient of `tensor`; without elements if none is needed."""
    return torch.empty_like(tensor if needed else tensor[:0], dtype=dtype)


def save_unscaled_grads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the gradients in `output`, from `over_chunks`; the last two of `inputs` say which were needed."""
    hidden, weight, *_, hidden_grad, weight_grad = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.grad_dtypes = hidden.dtype if hidden_grad else None, weight.dtype if weight_grad else None


def scale_saved_grads(ctx: Any, grad_total: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of `hidden` and `weight`: the saved ones times `grad_total`, the loss sum's gradient."""
    grads = (
        None if dtype is None or grad_total is None else times(grad, grad_total, dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.grad_dtypes, strict=True)
    )
    return *grads, None, None, None, None, None


def times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `grad * factor`, computed in fp32 and rounded once."""
    # On the CPU the operator would call the plain form; calling it directly saves the operator's overhead.
    return (scaled if grad.is_cuda else scaled_plain)(grad, factor, dtype)


_forward.register_autograd(scale_saved_grads, setup_context=save_unscaled_grads)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total + a @ b` in fp32, stored in `total` if given; if the device can, as one matrix multiplication."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_(a @ b)


PLAIN_BYTES = 2**27
"""Up to this size, all logits are computed at once, with torch's cross-entropy, which allocates several copies."""
CHUNK_BYTES = 2**30
"""The maximum size of one chunk's logits. With larger chunks, the weight's gradient is accumulated less often."""


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerm:
    """Return the loss for logits (…, vocabulary) and labels (…), in fp32."""
    if is_sharded(logits):
        from plait.models.common.vocab_parallel_cross_entropy import sharded_cross_entropy, vocabulary_shard

        shard, local = vocabulary_shard(logits, -1), logits.to_local()
        rows = max(1, PLAIN_BYTES // (4 * shard.most))
        total = sharded_cross_entropy(local.flatten(0, -2), labels.flatten(), shard, rows)
    else:
        total = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_bytes: int = CHUNK_BYTES, fp8: Fp8Head | None = None
) -> LossTerm:
    """Return the loss for the logits `hidden @ weight.T`; in chunks of at most `chunk_bytes` where they are large.

    Both forms give the same loss and, up to rounding, the same gradients; the chunked one cannot be differentiated
    twice. See [Note: chunked loss]. With `fp8`, the loss is always chunked, the gradients are computed in 8 bits (see
    [Note: a head in 8 bits]), and the weight must not be sharded.
    """
    dtype = _compute_dtype(hidden)
    shard = None
    if is_sharded(weight):
        from plait.models.common import vocab_parallel_cross_entropy as vocab_parallel

        shard, weight = vocab_parallel.vocabulary_shard(weight, 0), weight.to_local()
    row_bytes = (weight.shape[0] if shard is None else shard.most) * dtype.itemsize
    if fp8 is None and labels.numel() * row_bytes <= min(PLAIN_BYTES, chunk_bytes):
        logits = F.linear(hidden, weight)
        if shard is None:
            return cross_entropy(logits, labels)

        total = vocab_parallel.sharded_cross_entropy(logits.flatten(0, -2), labels.flatten(), shard, labels.numel())
        return LossTerm(total, (labels != IGNORE_INDEX).sum())
    rows = max(1, chunk_bytes // row_bytes)
    rows = rows // 128 * 128 or rows  # whole tiles of a matrix unit
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    if fp8 is not None:
        assert shard is None, "a head that is sharded over the vocabulary has no 8-bit form"
        total = fp8_linear_cross_entropy(flat, weight, targets, rows, dtype, fp8)
    elif shard is None:
        total = chunked_linear_cross_entropy(flat, weight, targets, rows, dtype)
    else:
        total = vocab_parallel.sharded_linear_cross_entropy(flat, weight, targets, rows, dtype, shard)
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the full logits `hidden @ weight.T`; gathered if the weight is sharded over the vocabulary."""
    if not is_sharded(weight):
        return F.linear(hidden, weight)
    from torch.distributed.tensor import DTensor, Shard

    local = F.linear(hidden, weight.to_local())
    shape = torch.Size((*local.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        local, weight.device_mesh, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix multiplication of `x`: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class LMHead(nn.Module):
    """The last layer of a language model: a linear layer without bias that can also compute the loss.

    A tied head has no parameter of its own: it is called with the embedding's weight. So that weight has a single name,
    and building the model on the meta device cannot separate the two. Head and embedding both belong to the root FSDP
    group, whose parameters are unsharded while the root's forward pass runs.

    The weight may be a DTensor that is sharded over the vocabulary. The loss is then computed without gathering the
    logits; if logits are requested, they are gathered.
    """

    fp8_head: Fp8Head | None = None
    """Set where the loss computes its gradients in 8 bits."""

    def __init__(self, dim: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.features = dim
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, embedding: Tensor | None = None
    ) -> Tensor | LossTerm:
        """Return the loss if labels are given, else the logits; `embedding` is the weight of a tied head."""
        weight = self.weight if embedding is None else embedding
        assert weight is not None, "a tied head is called with the embedding's weight"
        if labels is None:
            return linear_logits(hidden, weight)
        return linear_cross_entropy(hidden, weight, labels, fp8=self.fp8_head)


# The chunked loss with gradients from 8-bit matrix multiplications.
#
# [Note: a head in 8 bits] Logits are computed in 16 bits as always, so the loss is the same. The two matrix
# multiplications that compute the gradients of `hidden` and `weight` have 8-bit inputs.
#
# The gradient of a row of logits is softmax minus one-hot. Its largest entry is that of the label, and rounding this
# entry costs more accuracy than rounding all others. So it is left out of the multiplications, and its contribution is
# added in higher precision: the label's row of `weight`, times the entry, to the gradient of `hidden`, and the row of
# `hidden`, times the entry, to the label's row of the gradient of `weight`. The other entries are probabilities, cast
# to e5m2, which has the range for them, with a fixed scale; `hidden` and `weight` are cast to e4m3, scaled by their
# amax.
#
# 8-bit multiplications cannot accumulate into their output, and a separate addition would read or write the weight's
# gradient three times per chunk. So the probabilities of several chunks are kept, one byte each, and multiplied at
# once. They take at most twice the bytes of one chunk's logits, whatever the number of tokens.


WAITING = 4
"""Chunks whose probabilities are kept for one multiplication: all chunks of 16,384 tokens with 128,256 words."""


class Fp8Head(NamedTuple):
    """Settings of a head whose gradients are computed in 8 bits."""

    emulated: bool
    """Tensors are cast to 8 bits as usual but multiplied in fp32, on devices that cannot multiply in 8 bits."""


def fp8_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, how: Fp8Head
) -> Tensor:
    """Return what `chunked_linear_cross_entropy` returns; its gradients are computed in 8 bits.

    See [Note: a head in 8 bits]. The number of features must be a multiple of 16. `rows` is rounded down to a multiple
    of 16, and at least 16.
    """
    rows = max(rows // MULTIPLE, 1) * MULTIPLE
    total: Tensor = _fp8_forward(hidden, weight, labels, rows, dtype, how.emulated, *needed_grads(hidden, weight))[0]
    return total


@torch.library.custom_op("plait::fp8_linear_cross_entropy", mutates_args=())
def _fp8_forward(
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
    inverse = torch.full((), 1.0 / PROB_SCALE, dtype=torch.float32, device=hidden.device)
    grad_hidden = empty_grad(hidden, hidden_grad, dtype)
    grad_weight: Tensor | None = None
    turned = _fp8_transposed(weight_in) if hidden_grad else None  # once, for all chunks
    for first in range(0, len(labels), rows * WAITING):
        several = slice(first, first + rows * WAITING)
        x, targets, grads = hidden[several].to(dtype), labels[several], grad_hidden[several]
        label_rows = targets.clamp(min=0)  # IGNORE_INDEX is negative
        label_grads = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        tokens = len(targets) + -len(targets) % MULTIPLE
        waiting = weight.new_empty((len(weight), tokens), dtype=E5M2) if weight_grad else None
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            columns = None if waiting is None else waiting[:, start : min(start + rows, tokens)]
            losses, probs = _chunk(x[piece] @ weight_in.t(), targets[piece], label_grads[piece], columns, hidden_grad)
            total += losses.sum()
            if turned is not None:
                inverses, b = (inverse, turned.inverse), turned.columns.t()
                product_grads = scaled_product(probs, b, inverses, dtype, fast=False, emulated=emulated)
                torch.addcmul(product_grads, label_grads[piece, None], weight_in[label_rows[piece]], out=grads[piece])
            del probs  # else two chunks would be in memory at the same time
        if waiting is not None:
            small = _fp8_transposed(x)
            inverses, b = (inverse, small.inverse), small.columns.t()
            product = scaled_product(waiting, b, inverses, torch.float32, fast=False, emulated=emulated)
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del waiting, product  # before more is allocated
            grad_weight.index_add_(0, label_rows, x * label_grads[:, None])
    if grad_weight is None:  # not needed, or no tokens
        grad_weight = empty_grad(weight, weight_grad, torch.float32).zero_()
    return total, grad_hidden, grad_weight


@_fp8_forward.register_fake
def _fp8_forward_fake(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, emulated: bool, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(hidden, weight, dtype, needed)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return *scale_saved_grads(ctx, *grads), None


_fp8_forward.register_autograd(_backward, setup_context=save_unscaled_grads)


def _chunk(
    logits: Tensor, labels: Tensor, grads: Tensor, columns: Tensor | None, hidden_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the probabilities of all tokens but the label in 8 bits.

    The latter are empty without `hidden_grad`. Stores the transposed probabilities into `columns`, if given, and the
    gradients of the labels' logits into `grads`.
    """
    counted = labels != IGNORE_INDEX
    local_label = labels.where(counted, -1)
    if has_loss_kernels(logits):
        maxima, sums, targets = row_statistics_triton(logits, local_label)
        log_totals = maxima + sums.log()
    else:
        wide = logits.float()
        log_totals, targets = wide.logsumexp(1), wide.gather(1, local_label.clamp(min=0)[:, None]).squeeze(1)
    losses = log_totals - targets
    grads.copy_(torch.expm1(-losses).where(counted, 0.0))
    vocabulary = logits.shape[1]
    probs = logits.new_empty((len(logits), vocabulary + -vocabulary % MULTIPLE) if hidden_grad else 0, dtype=E5M2)
    if hidden_grad or columns is not None:
        write_fp8_probs(logits, local_label, log_totals, probs if hidden_grad else None, columns)
    return losses.where(counted, 0.0), probs


def _fp8_transposed(x: Tensor) -> Fp8Matrix:
    return fp8_cast([x], amax_of([x]), E4M3, rows=False, columns=True)
