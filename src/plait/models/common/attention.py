"""Causal self-attention with grouped queries, rotary embedding, and masks for packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from plait.errors import ModelError
from plait.models.common.init import residual_output


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines in Llama's rotate-half layout for one forward: (batch or 1, 1, tokens, head_dim / 2), fp32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, base: float) -> Rotary:
        """Return the tables for positions of shape (batch or 1, tokens).

        They are computed in each forward pass, not kept in a buffer: that costs little compared with one attention, and
        a model without buffers need not compute any after it was built on the meta device.
        """
        return cls(*rotary_table(positions, head_dim, base))

    def rotate(self, x: Tensor) -> Tensor:
        """Return `x` (batch, heads, tokens, head_dim) with each pair (i, i + head_dim / 2) rotated by its angle.

        Computed in fp32 whatever the dtype of `x`: in bf16, large neighbouring positions are the same number.
        """
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


def rotate_both(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated queries and keys."""
    return rotary.rotate(q), rotary.rotate(k)


# A single operator for `torch.compile`. If the compiler traced into it, it would fuse powers, cosines and sines into
# every layer that uses the table, so each layer would compute them again.
@torch.library.custom_op("plait::rotary_table", mutates_args=())
def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (batch or 1, 1, tokens, head_dim / 2), fp32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


@rotary_table.register_fake
def _(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    batch, tokens = positions.shape
    shape = (batch, 1, tokens, head_dim // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


class Shared:
    """The inputs that all blocks of one forward pass share; the model creates one object per forward pass.

    `rotary` are the rotary tables, if any; `mask` says where attention is allowed, if it is not simply causal (see
    `packing_mask`); `real` says which tokens are not padding, if any are padding. The class is deliberately neither a
    tuple nor a dataclass: FSDP casts float tensors in a block's arguments to the compute dtype, also those in tuples,
    dicts and dataclasses, but not those in other objects. So the rotary tables stay fp32 under every strategy.
    """

    def __init__(
        self, rotary: Rotary | None = None, mask: Tensor | BlockMask | None = None, real: Tensor | None = None
    ) -> None:
        self.rotary = rotary
        self.mask = mask
        self.real = real


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float = 0.0) -> Tensor:
    """Return attention over (batch, heads, tokens, head_dim); `k` and `v` may have fewer heads than `q`."""
    group = q.shape[1] // k.shape[1]
    if isinstance(mask, BlockMask):
        return _compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=group > 1)
    if group > 1 and (mask is not None or (q.is_cuda and q.dtype == torch.float32)):
        # Only the memory-efficient kernel is fast with a mask or in fp32, and it does not support GQA.
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        group = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=group > 1
    )


def _compiled_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """Return FlexAttention, compiled: in eager mode it would store all scores. In a compiled block it is traced."""
    call: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    return call(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


@cache
def _compiled() -> Callable[..., Any]:
    """Return compiled FlexAttention. It is compiled on first use, because that imports the compiler."""
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Multi-head attention with grouped queries; with rotary embedding where `Shared` has tables."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, *, layers: int, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if dim % heads or heads % kv_heads:
            raise ModelError(
                f"model.dim={dim} must be a multiple of model.heads={heads}, "
                f"and model.heads a multiple of model.kv_heads={kv_heads}"
            )
        self.head_dim = dim // heads
        self.dropout = dropout
        self.attend = attend
        """The attention function; context parallelism and caches replace it."""
        self.rotate = rotate_both
        """The rotary function; fused kernels replace it."""
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.out = residual_output(nn.Linear(dim, dim, bias=bias), layers)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Return self-attention of `x` (batch, tokens, dim)."""
        q, k, v = (self._split(projected) for projected in self.project(x))
        if shared.rotary is not None:
            q, k = self.rotate(shared.rotary, q, k)
        y = self.attend(q, k, v, shared.mask, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values, (batch, tokens, features) each."""
        return [layer(x) for layer in (self.q, self.k, self.v)]

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


# Masks for rows that contain several documents: a token attends to earlier tokens of its document only.
#
# [Note: blocks of documents] FlexAttention divides the scores into blocks of `BLOCK` queries × `BLOCK` keys. It skips
# blocks in which nothing is allowed, and evaluates the mask only in blocks that are allowed in part. torch's
# `create_block_mask` finds these by evaluating the mask for all tokens × tokens pairs, in memory. Here the smallest and
# the largest document id of each block of tokens are enough. Queries and keys can have a document in common only if
# the ranges of their ids overlap (and if documents are consecutive, they do have one then). A block is fully allowed if
# its keys lie before its queries and both belong to one and the same document.


BLOCK = 128
"""Tokens of a block: FlexAttention's default."""


def document_mask(document_ids: Tensor) -> Tensor:
    """Return the boolean mask that is causal within documents, for document ids of shape (batch, tokens)."""
    tokens = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


def packing_mask(document_ids: Tensor | None, *, head_dim: int, dropout: float = 0.0) -> Tensor | BlockMask | None:
    """Return the mask for packed rows, in the form with which `attend` is fastest; None without ids.

    On CUDA that is a `BlockMask`, with which scores outside of documents are skipped: at 4,096 tokens, attention takes
    about a fifth of its time with a boolean mask. It supports neither dropout nor a head dim below 16.
    """
    if document_ids is None:
        return None
    if not document_ids.is_cuda or dropout or head_dim < 16:
        return document_mask(document_ids)
    return document_blocks(document_ids)


def document_blocks(ids: Tensor) -> BlockMask:
    """Return the mask of `document_mask` as a `BlockMask`; see [Note: blocks of documents]."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[batch, query] == ids[batch, key])

    batch, tokens = ids.shape
    rest = -tokens % BLOCK
    # The padding of the last block gets another document id, so that the block is not fully allowed.
    padded = torch.cat((ids, (ids[:, -1:] + 1).expand(batch, rest)), dim=1) if rest else ids
    low, high = padded.view(batch, -1, BLOCK).aminmax(dim=-1)
    number = torch.arange(low.shape[1], device=ids.device)
    before = (number[:, None] >= number)[None]
    overlap = before & (high[:, None, :] >= low[:, :, None]) & (low[:, None, :] <= high[:, :, None])
    one = low == high
    same = (one[:, :, None] & one[:, None, :]) & (low[:, :, None] == low[:, None, :])
    full = same & (number[:, None] > number)[None]
    return BlockMask.from_kv_blocks(
        *_listed(overlap & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(tokens, tokens)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true entries in each row of `blocks` (batch, rows, columns), and their columns; one head."""
    flags = blocks[:, None].int()
    return flags.sum(-1, dtype=torch.int32), flags.argsort(dim=-1, descending=True, stable=True).int()
