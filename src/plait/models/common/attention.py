"""Causal self-attention with grouped queries, and what the blocks of one forward share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from plait.errors import ModelError
from plait.models.common.init import residual_output
from plait.models.common.rope import Rotary, rotate_both


class Shared:
    """What every block of one forward needs beside its input; made once, by the model.

    `rotary` is the rotary table, if any; `mask` says where attention is allowed, if not plainly causal (see
    `packing_mask`); `real` says which tokens are no fillers, if some are. A plain object on purpose: sharding casts
    the float tensors among a block's arguments to the compute dtype, and it finds them in tuples, dicts and
    dataclasses, but not here. So the rotary table stays fp32 under every strategy.
    """

    def __init__(
        self, rotary: Rotary | None = None, mask: Tensor | BlockMask | None = None, real: Tensor | None = None
    ) -> None:
        self.rotary = rotary
        self.mask = mask
        self.real = real


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float = 0.0) -> Tensor:
    """Attention over (batch, heads, tokens, head_dim); `k` and `v` may have fewer heads than `q`."""
    group = q.shape[1] // k.shape[1]
    if isinstance(mask, BlockMask):
        return _compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=group > 1)
    if group > 1 and (mask is not None or (q.is_cuda and q.dtype == torch.float32)):
        # The memory-efficient kernel, the only fast one that takes a mask or fp32, has no grouped form.
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        group = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=group > 1
    )


def _compiled_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """Uncompiled it would hold all scores; inside a compiled block the call is simply part of the block."""
    call: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    return call(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


@cache
def _compiled() -> Callable[..., Any]:
    """Made at the first call: it loads the compiler, which most runs do without."""
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Queries, keys, values, attention, output; rotary where `Shared` brings a table."""

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
        """How tokens are mixed. Where they are spread over ranks, another function takes its place."""
        self.rotate = rotate_both
        """How positions are put into queries and keys."""
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.out = residual_output(nn.Linear(dim, dim, bias=bias), layers)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Mix the tokens of (batch, tokens, dim)."""
        q, k, v = (self._split(each) for each in self.project(x))
        if shared.rotary is not None:
            q, k = self.rotate(shared.rotary, q, k)
        y = self.attend(q, k, v, shared.mask, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, (batch, tokens, features) each."""
        return [layer(x) for layer in (self.q, self.k, self.v)]

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
