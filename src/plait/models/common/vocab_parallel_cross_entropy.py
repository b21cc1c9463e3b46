"""Vocabulary-parallel cross-entropy: the loss of logits that are sharded along the vocabulary.

[Note: a loss over a sharded vocabulary] Where each rank has a shard of the vocabulary, the loss of a row (a token)
needs three numbers from all ranks: the largest logit, the sum of exponentials, and the target's logit, which one rank
has. Two all-reduces compute them, a maximum and then two sums, in fp32; logits are not sent. Each rank then computes
the gradient of its own logits.

`torch.compile` must not trace these collectives. The decorator `torch.compiler.disable` imports the compiler, so this
file is imported on first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.distributed import is_sharded
from plait.kernels import has_loss_kernels, logit_grads_triton, row_statistics_triton
from plait.models.common.losses import over_chunks, save_unscaled_grads, scale_saved_grads, times
from plait.models.common.protocol import IGNORE_INDEX


class VocabularyShard(NamedTuple):
    """A rank's shard of the vocabulary."""

    start: int
    """The index of its first token."""
    most: int
    """The size of the largest shard. The number of tokens per chunk is computed from it, so that it is the same on all
    ranks."""
    group: dist.ProcessGroup
    """The ranks that share the vocabulary."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sharded_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, shard: VocabularyShard
) -> Tensor:
    """Return what `chunked_linear_cross_entropy` returns, from this rank's rows of the weight; call it on all ranks.

    Its gradient for `hidden` is this rank's term of a sum over `shard.group`: the caller has to all-reduce it.
    """
    total: Tensor = _ShardedLinearCrossEntropy.apply(hidden, weight, labels, rows, dtype, shard)  # type: ignore[no-untyped-call]
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sharded_cross_entropy(logits: Tensor, labels: Tensor, shard: VocabularyShard, rows: int) -> Tensor:
    """Return the sum of the losses over the whole vocabulary, from this rank's logits (tokens, size of the shard).

    `rows` tokens are computed at a time. Call it on all ranks.
    """
    total: Tensor = _ShardedCrossEntropy.apply(logits, labels, shard, rows)  # type: ignore[no-untyped-call]
    return total


def sharded_loss_and_grads(logits: Tensor, labels: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the losses (tokens,) over the whole vocabulary, and the gradients of this rank's logits.

    See [Note: a loss over a sharded vocabulary]. Kernels overwrite `logits`.
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
    """Return for each row, in fp32: the largest logit, the sum of exp(logit - largest), the logit at `local_label`."""
    wide = logits.float()
    maxima = wide.amax(1)
    sums = (wide - maxima[:, None]).exp_().sum(1)
    return maxima, sums, wide.gather(1, local_label.clamp(min=0)[:, None]).squeeze(1)


def logit_grads(logits: Tensor, local_label: Tensor, log_total: Tensor) -> Tensor:
    """Return softmax (`log_total`: log of its denominator), minus 1 at `local_label` where that is not negative."""
    wide = (logits.float() - log_total[:, None]).exp_()
    return wide.scatter_add_(1, local_label.clamp(min=0)[:, None], -(local_label >= 0).float()[:, None]).to(
        logits.dtype
    )


class _ShardedLinearCrossEntropy(torch.autograd.Function):
    """Linear layer and loss in chunks ([Note: chunked loss]) over a shard of the vocabulary.

    It is not a `torch.library` operator, since these take no process groups.
    """

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
    """Cross-entropy over a shard of the vocabulary; saves the gradient instead of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard, rows: int) -> Tensor:
        needed = ctx.needs_input_grad[0]
        grads = torch.empty_like(logits if needed else logits[:0])
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, len(labels), rows):
            piece = slice(start, start + rows)
            # A copy, since the kernel overwrites its input.
            losses, piece_grads = sharded_loss_and_grads(logits[piece].clone(), labels[piece], shard)
            total += losses.sum()
            if needed:
                torch.mul(piece_grads, (labels[piece] != IGNORE_INDEX)[:, None], out=grads[piece])
            del losses, piece_grads  # else two chunks would be in memory at the same time
        ctx.save_for_backward(grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (grads,) = ctx.saved_tensors
        return times(grads, grad_total, grads.dtype), None, None, None


def vocabulary_shard(tensor: Tensor, dim: int) -> VocabularyShard:
    """Return this rank's shard of the vocabulary, for a DTensor whose dimension `dim` is the sharded vocabulary."""

    assert is_sharded(tensor)
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    assert placement.is_shard(dim % tensor.ndim), f"{placement} is not along the vocabulary"
    share = -(-tensor.shape[dim] // mesh.size())  # DTensor splits as torch.chunk does
    return VocabularyShard(mesh.get_local_rank() * share, share, mesh.get_group())
