"""Cross-entropy as (sum, count): from logits, or from hidden states without ever holding all logits.

Logits or the head's weight may be DTensors of which each rank has some words of the vocabulary. Then the loss is
computed from the parts; see [Note: a loss over parts of the vocabulary] in `split_loss`. The gradient with respect
to the hidden states is then this rank's summand: who calls it this way has to sum them over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
    logit_grads_triton,
    loss_and_grads_triton,
    row_statistics_triton,
    scaled,
    scaled_plain,
    scaled_product,
    write_fp8_probs,
)
from plait.models.common.protocol import IGNORE_INDEX, LossTerm

# Linear layer and cross-entropy in one, over chunks of tokens.
#
# [Note: chunked loss] The logits are the largest tensor of a language model: 16,384 tokens × 128,256 words are
# 8.4 GB in fp32, and their gradient is as large again. The chunked form goes over the tokens in pieces. The
# gradient of a *sum* of losses with respect to a piece's logits is known as soon as the piece is (softmax minus
# one-hot), so the forward finishes each piece's share of the gradients of `hidden` and `weight`, and the
# backward only scales them by the incoming scalar. Scaling is done in fp32: rounding that scalar to bf16 would
# scale every gradient of the model by the same error.
#
# It is one operator to `torch.compile`. Traced into, the pieces would be reordered and all be held at once.


LossAndGrads = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """Sum of the losses of `hidden` (tokens, dim), `rows` tokens at a time, products in `dtype`."""
    total: Tensor = _forward(hidden, weight, labels, rows, dtype, *needed_grads(hidden, weight))[0]
    return total


def loss_and_grads(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, fp32, and its gradient with respect to the logits, in their dtype.

    The gradient of an ignored row is left as if it counted for label 0. Overwrites `logits` where it can.
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
    evaluate: LossAndGrads,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and the unscaled gradients; empty where one is not needed."""
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
        # Ignored rows are struck out of the small factors, which spares a pass over the large one.
        counted = (labels[piece] != IGNORE_INDEX)[:, None]
        if hidden_grad:
            torch.mm(grads, cast_weight, out=grad_hidden[piece]).mul_(counted)
        if weight_grad:
            grad_weight = _add_product(grad_weight, grads.t(), cast_hidden * counted)
        del losses, grads  # or two chunks would be held
    if grad_weight is None:  # not needed, or nothing to learn from
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
    """What `over_chunks` answers with, for tensors that have none."""
    total = hidden.new_empty((), dtype=torch.float32)
    return total, empty_grad(hidden, needed[0], dtype), empty_grad(weight, needed[1], torch.float32)


def empty_grad(tensor: Tensor, needed: bool, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient of `tensor`; empty where none is needed."""
    return torch.empty_like(tensor if needed else tensor[:0], dtype=dtype)


def save_unscaled_grads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what `over_chunks` has answered with; the inputs end with what was needed."""
    hidden, weight, *_, hidden_grad, weight_grad = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = hidden.dtype if hidden_grad else None, weight.dtype if weight_grad else None


def scale_saved_grads(ctx: Any, grad_total: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
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


_forward.register_autograd(scale_saved_grads, setup_context=save_unscaled_grads)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b` in fp32, in the place of `total` where there is one; within the product where the device can."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_(a @ b)


PLAIN_BYTES = 2**27
"""Logits that take no more than this are held whole, for the plain form; it needs several copies of them."""
CHUNK_BYTES = 2**30
"""What the logits of one chunk may take. Larger chunks add up the weight's gradient less often."""


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerm:
    """Loss from logits (…, vocabulary) and labels (…), in fp32."""
    if is_sharded(logits):
        shard, local = _vocabulary_shard(logits, -1), logits.to_local()
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
    """Loss of the logits `hidden @ weight.T`; in chunks of at most `chunk_bytes` where they are many.

    Both forms give the same loss and, up to rounding, the same gradients; the chunked one can be
    differentiated once only. See [Note: chunked loss]. With `fp8`, which takes a whole weight, it is chunked always,
    and its backward products are in 8 bits: [Note: a head in 8 bits] in `fp8_loss`.
    """
    dtype = _compute_dtype(hidden)
    shard = None
    if is_sharded(weight):
        shard, weight = _vocabulary_shard(weight, 0), weight.to_local()
    row_bytes = (weight.shape[0] if shard is None else shard.most) * dtype.itemsize
    if fp8 is None and labels.numel() * row_bytes <= min(PLAIN_BYTES, chunk_bytes):
        logits = F.linear(hidden, weight)
        if shard is None:
            return cross_entropy(logits, labels)

        total = sharded_cross_entropy(logits.flatten(0, -2), labels.flatten(), shard, labels.numel())
        return LossTerm(total, (labels != IGNORE_INDEX).sum())
    rows = max(1, chunk_bytes // row_bytes)
    rows = rows // 128 * 128 or rows  # whole tiles of a matrix unit
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    if fp8 is not None:
        assert shard is None, "a head of which each rank has a part has no 8-bit form"
        total = fp8_linear_cross_entropy(flat, weight, targets, rows, dtype, fp8)
    elif shard is None:
        total = chunked_linear_cross_entropy(flat, weight, targets, rows, dtype)
    else:
        total = sharded_linear_cross_entropy(flat, weight, targets, rows, dtype, shard)
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits `hidden @ weight.T`, whole even where the weight is not."""
    if not is_sharded(weight):
        return F.linear(hidden, weight)
    from torch.distributed.tensor import DTensor, Shard

    local = F.linear(hidden, weight.to_local())
    shape = torch.Size((*local.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    split = DTensor.from_local(
        local, weight.device_mesh, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
    return split.full_tensor()


def _vocabulary_shard(tensor: Tensor, dim: int) -> VocabularyShard:
    """Which words this rank has, of a DTensor that is split along the vocabulary."""

    assert is_sharded(tensor)
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    assert placement.is_shard(dim % tensor.ndim), f"{placement} is not along the vocabulary"
    share = -(-tensor.shape[dim] // mesh.size())  # parts are as torch.chunk cuts them
    return VocabularyShard(mesh.get_local_rank() * share, share, mesh.get_group())


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of `x` is computed in: autocast decides where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# The loss where each rank has some words of the vocabulary.
#
# [Note: a loss over parts of the vocabulary] Where each rank has some words, a row's loss needs three numbers of all
# ranks: the largest logit, the sum of exponentials, and the target's logit, which one rank has. Two all-reduces of
# three fp32 numbers a row bring them together; no logit travels. Each rank then knows the gradient of its own logits.
#
# Loaded by those who need it: keeping the compiler out loads the compiler.


class VocabularyShard(NamedTuple):
    """A rank's part of the vocabulary."""

    start: int
    """Its first word."""
    most: int
    """How many words the rank with the most of them has. Chunks go by it: all ranks must cut alike."""
    group: dist.ProcessGroup
    """The ranks that have the others."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sharded_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, shard: VocabularyShard
) -> Tensor:
    """`chunked_linear_cross_entropy` from this rank's rows of the weight; the gradient of `hidden` is its summand."""
    total: Tensor = _ShardedLinearCrossEntropy.apply(hidden, weight, labels, rows, dtype, shard)  # type: ignore[no-untyped-call]
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sharded_cross_entropy(logits: Tensor, labels: Tensor, shard: VocabularyShard, rows: int) -> Tensor:
    """Sum of the losses of this rank's logits (tokens, own words), looked at `rows` tokens at a time."""
    total: Tensor = _ShardedCrossEntropy.apply(logits, labels, shard, rows)  # type: ignore[no-untyped-call]
    return total


def sharded_loss_and_grads(logits: Tensor, labels: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """`loss_and_grads` of this rank's part of the logits; the losses are those of the whole.

    See [Note: a loss over parts of the vocabulary].
    """
    counted = labels != IGNORE_INDEX
    local_label = labels - shard.start
    is_local = counted & (local_label >= 0) & (local_label < logits.shape[1])
    local_label = local_label.where(is_local, -1)
    fused = has_loss_kernels(logits)
    maxima, sums, targets = (row_statistics_triton if fused else row_statistics)(logits, local_label)
    top = maxima.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    summed = torch.stack([sums * (maxima - top).exp(), (targets - top).where(is_local, 0.0)])
    dist.all_reduce(summed, group=shard.group)
    log_sum, target = summed[0].log(), summed[1]
    grads = (logit_grads_triton if fused else logit_grads)(logits, local_label, top + log_sum)
    return (log_sum - target).where(counted, 0.0), grads


def row_statistics(logits: Tensor, local_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row, in fp32: the largest logit, the sum of exponentials relative to it, the logit at `local_label`."""
    wide = logits.float()
    maxima = wide.amax(1)
    sums = (wide - maxima[:, None]).exp_().sum(1)
    return maxima, sums, wide.gather(1, local_label.clamp(min=0)[:, None]).squeeze(1)


def logit_grads(logits: Tensor, local_label: Tensor, log_total: Tensor) -> Tensor:
    """Softmax, given the logarithm of its denominator, less one at `local_label`, where that is not negative."""
    wide = (logits.float() - log_total[:, None]).exp_()
    return wide.scatter_add_(1, local_label.clamp(min=0)[:, None], -(local_label >= 0).float()[:, None]).to(
        logits.dtype
    )


class _ShardedLinearCrossEntropy(torch.autograd.Function):
    """The chunked form over a part of the vocabulary. No operator: those take no process groups."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, shard: VocabularyShard
    ) -> Tensor:
        needed = ctx.needs_input_grad[:2]

        def evaluate(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return sharded_loss_and_grads(logits, targets, shard)

        output = over_chunks(hidden, weight, labels, rows, dtype, needed, evaluate)
        save_unscaled_grads(ctx, (hidden, weight, *needed), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        return scale_saved_grads(ctx, grad_total)[:6]


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a part of the vocabulary; keeps the gradient instead of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard, rows: int) -> Tensor:
        needed = ctx.needs_input_grad[0]
        grads = torch.empty_like(logits if needed else logits[:0])
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, len(labels), rows):
            piece = slice(start, start + rows)
            # A copy: the caller's logits are not overwritten.
            losses, piece_grads = sharded_loss_and_grads(logits[piece].clone(), labels[piece], shard)
            total += losses.sum()
            if needed:
                torch.mul(piece_grads, (labels[piece] != IGNORE_INDEX)[:, None], out=grads[piece])
            del losses, piece_grads  # or two chunks would be held
        ctx.save_for_backward(grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (grads,) = ctx.saved_tensors
        return times(grads, grad_total, grads.dtype), None, None, None


# The last layer of a language model: hidden states to logits, or straight to the loss.


class LMHead(nn.Module):
    """A linear layer without bias that can finish the loss itself.

    A tied head has no parameter: it is called with the embedding's. So there is one name and one tensor, and
    no tie that a build on the meta device could break. Head and embedding both belong to the root's shard
    group, whose parameters are whole while the root's forward runs.

    The weight may be a DTensor of which each rank has some words. Then the loss is computed without gathering
    logits, and logits, where asked for, are gathered.
    """

    fp8_head: Fp8Head | None = None
    """How the loss computes its gradients, where that is in 8 bits."""

    def __init__(self, dim: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.features = dim
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, embedding: Tensor | None = None
    ) -> Tensor | LossTerm:
        """Loss where labels are given, logits where not; `embedding` is the weight of a tied head."""
        weight = self.weight if embedding is None else embedding
        assert weight is not None, "a tied head is called with the embedding's weight"
        if labels is None:
            return linear_logits(hidden, weight)
        return linear_cross_entropy(hidden, weight, labels, fp8=self.fp8_head)


# The chunked loss whose two backward products are computed from 8-bit numbers.
#
# [Note: a head in 8 bits] Logits are computed in 16 bits as always, so the loss is the same number. Of the three
# products of a head it is the other two, which make the gradients of `hidden` and `weight`, that take numbers in 8
# bits.
#
# The gradient of a row of logits is softmax less one-hot. Most of it is one number, that of the right word, and to
# round that one costs more than to round all others. So it is left out of the products, and what it makes is added in
# wide numbers: a row of `weight` to a row of the one gradient, a row of `hidden` to a row of the other. What is left is
# probabilities. They are e5m2, which has the range for them, with a fixed scale; `hidden` and `weight` are e4m3, scaled
# by their largest number.
#
# Products in 8 bits cannot add to what is there, and to add afterwards would move the weight's gradient three times for
# each chunk. So the probabilities of several chunks wait, a byte each, and their share of the weight's gradient is one
# product; only if there are more chunks than wait together is anything added. What waits takes twice the bytes of one
# chunk's logits, however many tokens there are.


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
        rows_of_product = slice(first, first + rows * WAITING)
        x, targets, grads = hidden[rows_of_product].to(dtype), labels[rows_of_product], grad_hidden[rows_of_product]
        label_rows = targets.clamp(min=0)  # IGNORE_INDEX is negative
        grads = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        tokens = len(targets) + -len(targets) % MULTIPLE
        waiting = weight.new_empty((len(weight), tokens), dtype=E5M2) if weight_grad else None
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            columns = None if waiting is None else waiting[:, start : min(start + rows, tokens)]
            losses, probs = _chunk(x[piece] @ weight_in.t(), targets[piece], grads[piece], columns, hidden_grad)
            total += losses.sum()
            if turned is not None:
                inverses, b = (inverse, turned.inverse), turned.columns.t()
                product_grads = scaled_product(probs, b, inverses, dtype, fast=False, emulated=emulated)
                torch.addcmul(product_grads, grads[piece, None], weight_in[label_rows[piece]], out=grads[piece])
            del probs  # or two chunks would be held
        if waiting is not None:
            small = _fp8_transposed(x)
            inverses, b = (inverse, small.inverse), small.columns.t()
            product = scaled_product(waiting, b, inverses, torch.float32, fast=False, emulated=emulated)
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del waiting, product  # before more is asked for
            grad_weight.index_add_(0, label_rows, x * grads[:, None])
    if grad_weight is None:  # not needed, or nothing to learn from
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
    """The loss of each row, and the other words' probabilities in 8 bits; turned over, they are put into `columns`.

    `grads` are given the gradients of the labels' logits. Who wants no `hidden_grad` gets an empty matrix.
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
