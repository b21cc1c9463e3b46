"""Cross-entropy as (sum, count): from logits, or from hidden states without ever holding all logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models.common.chunked_loss import chunked_linear_cross_entropy
from plait.models.common.protocol import IGNORE_INDEX
from plait.spec import LossTerm

PLAIN_BYTES = 2**27
"""Logits that take no more than this are held whole, for the plain form; it needs several copies of them."""
CHUNK_BYTES = 2**30
"""What the logits of one chunk may take. Larger chunks add up the weight's gradient less often."""


def cross_entropy(logits: Tensor, labels: Tensor) -> LossTerm:
    """Loss from logits (…, vocabulary) and labels (…), in fp32."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> LossTerm:
    """Loss of the logits `hidden @ weight.T`; in chunks of at most `chunk_bytes` where they are many.

    Both forms give the same loss and, up to rounding, the same gradients; the chunked one can be
    differentiated once only. See [Note: chunked loss].
    """
    dtype = _compute_dtype(hidden)
    row_bytes = weight.shape[0] * dtype.itemsize
    if labels.numel() * row_bytes <= min(PLAIN_BYTES, chunk_bytes):
        return cross_entropy(F.linear(hidden, weight), labels)
    rows = max(1, chunk_bytes // row_bytes)
    rows = rows // 128 * 128 or rows  # whole tiles of a matrix unit
    total = chunked_linear_cross_entropy(hidden.flatten(0, -2), weight, labels.flatten(), rows, dtype)
    return LossTerm(total, (labels != IGNORE_INDEX).sum())


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of `x` is computed in: autocast decides where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
