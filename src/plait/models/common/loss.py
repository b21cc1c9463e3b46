"""Cross-entropy as (sum, count): from logits, or from hidden states without ever holding all logits.

Logits or the head's weight may be DTensors of which each rank has some words of the vocabulary. Then the loss is
computed from the parts; see [Note: a loss over parts of the vocabulary] in `split_loss`. The gradient with respect
to the hidden states is then this rank's summand: who calls it this way has to sum them over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models.common.chunked_loss import chunked_linear_cross_entropy
from plait.models.common.protocol import IGNORE_INDEX
from plait.spec import LossTerm
from plait.world import is_sharded

if TYPE_CHECKING:
    from plait.models.common.fp8_loss import Fp8Head
    from plait.models.common.split_loss import Words

PLAIN_BYTES = 2**27
"""Logits that take no more than this are held whole, for the plain form; it needs several copies of them."""
CHUNK_BYTES = 2**30
"""What the logits of one chunk may take. Larger chunks add up the weight's gradient less often."""


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerm:
    """Loss from logits (…, vocabulary) and labels (…), in fp32."""
    if is_sharded(logits):
        from plait.models.common.split_loss import split_cross_entropy

        words, own = _words_of(logits, -1), logits.to_local()
        rows = max(1, PLAIN_BYTES // (4 * words.most))
        total = split_cross_entropy(own.flatten(0, -2), labels.flatten(), words, rows)
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
    words = None
    if is_sharded(weight):
        words, weight = _words_of(weight, 0), weight.to_local()
    row_bytes = (weight.shape[0] if words is None else words.most) * dtype.itemsize
    if fp8 is None and labels.numel() * row_bytes <= min(PLAIN_BYTES, chunk_bytes):
        logits = F.linear(hidden, weight)
        if words is None:
            return cross_entropy(logits, labels)
        from plait.models.common.split_loss import split_cross_entropy

        total = split_cross_entropy(logits.flatten(0, -2), labels.flatten(), words, labels.numel())
        return LossTerm(total, (labels != IGNORE_INDEX).sum())
    rows = max(1, chunk_bytes // row_bytes)
    rows = rows // 128 * 128 or rows  # whole tiles of a matrix unit
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    if fp8 is not None:
        from plait.models.common.fp8_loss import fp8_linear_cross_entropy

        assert words is None, "a head of which each rank has a part has no 8-bit form"
        total = fp8_linear_cross_entropy(flat, weight, targets, rows, dtype, fp8)
    elif words is None:
        total = chunked_linear_cross_entropy(flat, weight, targets, rows, dtype)
    else:
        from plait.models.common.split_loss import split_linear_cross_entropy

        total = split_linear_cross_entropy(flat, weight, targets, rows, dtype, words)
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits `hidden @ weight.T`, whole even where the weight is not."""
    if not is_sharded(weight):
        return F.linear(hidden, weight)
    from torch.distributed.tensor import DTensor, Shard

    own = F.linear(hidden, weight.to_local())
    shape = torch.Size((*own.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    split = DTensor.from_local(
        own, weight.device_mesh, [Shard(own.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
    return split.full_tensor()


def _words_of(tensor: Tensor, dim: int) -> Words:
    """Which words this rank has, of a DTensor that is split along the vocabulary."""
    from plait.models.common.split_loss import Words

    assert is_sharded(tensor)
    mesh, (placement,) = tensor.device_mesh, tensor.placements
    assert placement.is_shard(dim % tensor.ndim), f"{placement} is not along the vocabulary"
    share = -(-tensor.shape[dim] // mesh.size())  # parts are as torch.chunk cuts them
    return Words(mesh.get_local_rank() * share, share, mesh.get_group())


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of `x` is computed in: autocast decides where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
