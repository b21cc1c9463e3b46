"""Rotary embedding of queries and keys: one kernel for both in the forward pass, and one in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, on_device_of

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _rotate_heads(  # type: ignore[no-untyped-def]
        x,
        out,
        batch,
        token,
        heads,
        x_batch,
        x_head,
        x_token,
        out_batch,
        out_head,
        out_token,
        cos,
        sin,
        half,
        head_block: tl.constexpr,
        half_block: tl.constexpr,
    ):
        """Rotate all heads of one token of `x`, and store them in `out`."""
        head = tl.arange(0, head_block)[:, None]
        at = tl.arange(0, half_block)[None, :]
        inside = (head < heads) & (at < half)
        x += batch * x_batch + token * x_token
        out += batch * out_batch + token * out_token
        first = tl.load(x + head * x_head + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + head * x_head + at + half, mask=inside, other=0.0).to(tl.float32)
        dtype = out.dtype.element_ty
        tl.store(out + head * out_head + at, (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(out + head * out_head + at + half, (second * cos + first * sin).to(dtype), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        tokens,
        q_heads,
        k_heads,
        half,
        q_batch,
        q_head,
        q_token,
        k_batch,
        k_head,
        k_token,
        qo_batch,
        qo_head,
        qo_token,
        ko_batch,
        ko_head,
        ko_token,
        table_batch,
        table_token,
        direction,
        q_block: tl.constexpr,
        k_block: tl.constexpr,
        half_block: tl.constexpr,
    ):
        """Rotate queries and keys, one program per token. `direction` is 1, or -1 for the backward pass."""
        program = tl.program_id(0).to(tl.int64)
        batch, token = program // tokens, program % tokens
        at = tl.arange(0, half_block)[None, :]
        offset = batch * table_batch + token * table_token + at
        c = tl.load(cos + offset, mask=at < half, other=0.0).to(tl.float32)
        s = tl.load(sin + offset, mask=at < half, other=0.0).to(tl.float32) * direction
        _rotate_heads(
            q,
            q_out,
            batch,
            token,
            q_heads,
            q_batch,
            q_head,
            q_token,
            qo_batch,
            qo_head,
            qo_token,
            c,
            s,
            half,
            q_block,
            half_block,
        )
        _rotate_heads(
            k,
            k_out,
            batch,
            token,
            k_heads,
            k_batch,
            k_head,
            k_token,
            ko_batch,
            ko_head,
            ko_token,
            c,
            s,
            half,
            k_block,
            half_block,
        )


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return `q` and `k` (batch, heads, tokens, head_dim) with each pair (i, i + head_dim / 2) rotated, in fp32.

    The tables are (batch or 1, tokens, at least head_dim / 2); only the first head_dim / 2 columns are used.
    """
    if implementation("rotary", q) == "torch" or q.stride(-1) != 1 or k.stride(-1) != 1:
        return apply_rotary_plain(q, cos, sin), apply_rotary_plain(k, cos, sin)
    turned_q, turned_k = _Rotate.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return turned_q, turned_k


def apply_rotary_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return one tensor, rotated as `apply_rotary` does, with torch operations."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = cos[:, None, :, :half].to(wide), sin[:, None, :, :half].to(wide)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """Rotates queries and keys. The backward pass rotates by the negative angle, so only the tables are saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *_rotated(_with_unit_stride(grad_q), _with_unit_stride(grad_k), cos, sin, -1.0), None, None


def _rotated_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, direction: float) -> tuple[Tensor, Tensor]:
    return q.clone(), k.clone()


@on_fake_tensors(_rotated_fake)
def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, direction: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    assert cos.stride() == sin.stride(), "both tables have the same strides"
    assert cos.stride(-1) == 1, "the tables are contiguous along the last dim"
    with on_device_of(q):
        _kernel[(batch * tokens,)](
            q,
            k,
            *out,
            cos,
            sin,
            tokens,
            q_heads,
            k_heads,
            dim // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            *out[0].stride()[:3],
            *out[1].stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            direction,
            q_block=triton.next_power_of_2(q_heads),
            k_block=triton.next_power_of_2(k_heads),
            half_block=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )
    return out


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
