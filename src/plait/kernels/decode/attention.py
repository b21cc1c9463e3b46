"""Attention of one new token per row over a KV cache: rotary embedding, cache update and attention in one kernel.

[Note: the new token] The query and the key of the new token are rotated when they are loaded. Its key and value are
written to the cache by the first program of each row and key-value head. This kernel does not read them back: that
program has them in registers, and all other programs read only slots before the new token. With GQA, one program
computes all queries that share a key-value head, so the cache is read once for them.

Where rows are long and the batch is small, several programs share the slots of a row; see [Note: the last program
reduces].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels import HAS_TRITON, apply_rotary_plain, implementation, on_device_of
from plait.kernels.decode.dependent_launch import (
    Prefetch,
    dependent_launch_options,
    prefetch_options,
    uses_dependent_launch,
)


class AttentionConfig(NamedTuple):
    """Launch configuration of the kernel."""

    tokens: int
    """Cache slots (tokens) that a program reads at a time."""
    warps: int
    stages: int
    programs: int = 528
    """Rows are split over several programs until there are about this many: four per SM of an H200."""


DEFAULT_CONFIG, MANY_ROWS_CONFIG = (
    AttentionConfig(tokens=64, warps=4, stages=3),
    AttentionConfig(tokens=32, warps=4, stages=4),
)
"""With the first, six programs fit on an SM of an H200; with the second, whose tiles are smaller, eight."""
MANY_PROGRAMS = 6 * 132
"""With more rows × key-value heads than this, the second one is used: the first could not run them all at once."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import (
        PREFETCH_ARGUMENTS,
        prefetch_next,
        prefetch_rows,
        wait_for_previous,
    )

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _rotated(x, at, half, c, s):  # type: ignore[no-untyped-def]
        """Load vectors of 2 * half features at `x`, and return them with each pair rotated; in the dtype of `x`."""
        value = tl.load(x + at).to(tl.float32)
        other = tl.load(x + (at + half) % (2 * half)).to(tl.float32)
        return (value * c + tl.where(at < half, -other, other) * s).to(x.dtype.element_ty)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _steps_of(position, splits, tokens):  # type: ignore[no-untyped-def]
        """Return the loop iterations of each program if `splits` programs share the slots before a position."""
        return tl.maximum(tl.cdiv(tl.cdiv(position, tokens), splits), 1)

    @triton.jit(do_not_specialize=["splits", *PREFETCH_ARGUMENTS])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        qkv,
        cos,
        sin,
        keys,
        values,
        positions,
        out,
        partial,
        counters,
        kv_heads,
        slots,
        scale,
        splits,
        next_first,
        next_second,
        next_third,
        next_n_first,
        next_n_second,
        next_n_third,
        next_width,
        next_stride,
        next_segment_bits,
        next_line_bits,
        group: tl.constexpr,
        padded: tl.constexpr,
        width: tl.constexpr,
        tokens: tl.constexpr,
        dependent: tl.constexpr,
        early: tl.constexpr,
        prefetches: tl.constexpr,
    ):
        """Compute attention; one program per row, key-value head and split (part of the row's slots)."""
        row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        base = (row * kv_heads + head) * slots * width
        if early:
            position = tl.load(positions + row, cache_modifier=".cg").to(tl.int32)
            if dependent:  # the keys and values of earlier tokens are already in the cache
                token = split * _steps_of(position, splits, tokens) * tokens + tl.arange(0, tokens)
                prefetch_rows(keys + base, tl.minimum(token, position), 0, width, width, (width + 63) // 64)
                prefetch_rows(values + base, tl.minimum(token, position), 0, width, width, (width + 63) // 64)
        if prefetches:
            prefetch_next(
                next_first,
                next_second,
                next_third,
                next_n_first,
                next_n_second,
                next_n_third,
                next_width,
                next_stride,
                next_segment_bits,
                next_line_bits,
                tl.program_id(0) + tl.num_programs(0) * (head + kv_heads * split),
                tl.num_programs(0) * kv_heads * splits,
            )
        if dependent:
            wait_for_previous()
        if not early:
            position = tl.load(positions + row).to(tl.int32)
        steps = _steps_of(position, splits, tokens)
        used_splits = tl.maximum(tl.cdiv(tl.cdiv(position, tokens), steps), 1)
        if split >= used_splits:
            return
        at, query = tl.arange(0, width), tl.arange(0, padded)
        row_qkv = qkv + row * ((group + 2) * kv_heads * width)
        half: tl.constexpr = width // 2
        c = tl.load(cos + position * half + at % half)
        s = tl.load(sin + position * half + at % half)
        # Queries beyond the group are copies of its last one; their results are not stored.
        real_query = tl.minimum(query, group - 1)
        q = _rotated(row_qkv + (head * group + real_query)[:, None] * width, at[None, :], half, c[None, :], s[None, :])
        k_new = _rotated(row_qkv + (group * kv_heads + head) * width, at, half, c, s)
        v_new = tl.load(row_qkv + ((group + 1) * kv_heads + head) * width + at)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        is_first = split == 0
        if is_first:
            tl.store(keys + base + position * width + at, k_new)
            tl.store(values + base + position * width + at, v_new)
        most = tl.where(is_first, score, float("-inf"))
        total = tl.where(is_first, score * 0.0 + 1.0, 0.0)
        weighted = tl.where(is_first, v_new.to(tl.float32)[None, :] + tl.zeros((padded, width), dtype=tl.float32), 0.0)
        end = tl.minimum((split + 1) * steps * tokens, position)
        for begin in range(split * steps * tokens, end, tokens):
            token = begin + tl.arange(0, tokens)
            offset = base + token[:, None] * width + at[None, :]
            inside = token < end
            k = tl.load(keys + offset, mask=inside[:, None], other=0.0)
            v = tl.load(values + offset, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            now = tl.maximum(most, tl.max(scores, 1))
            weight = tl.exp2(scores - now[:, None])
            fade = tl.exp2(most - now)
            total = total * fade + tl.sum(weight, 1)
            weighted = tl.dot(weight.to(v.dtype), v, weighted * fade[:, None], input_precision="ieee")
            most = now
        last = True
        if used_splits > 1:  # see [Note: the last program reduces]
            size: tl.constexpr = padded * (width + 2)
            first = partial + ((row * kv_heads + head) * splits) * size
            mine = first + split * size
            spot = query[:, None] * width + at[None, :]
            tl.store(mine + spot, weighted)
            tl.store(mine + padded * width + query, most)
            tl.store(mine + padded * (width + 1) + query, total)
            tl.debug_barrier()
            counter = counters + row * kv_heads + head
            last = tl.atomic_add(counter, 1, sem="acq_rel") == used_splits - 1
            if last:
                most = tl.full((padded,), float("-inf"), dtype=tl.float32)
                total = tl.zeros((padded,), dtype=tl.float32)
                weighted = tl.zeros((padded, width), dtype=tl.float32)
                for begin in range(0, used_splits, 2):  # two at a time, to overlap their latencies
                    number = begin + tl.arange(0, 2)
                    real = (number < used_splits)[:, None]
                    theirs = first + (number * size + padded * width)[:, None] + query[None, :]
                    peaks = tl.load(theirs, mask=real, other=float("-inf"), cache_modifier=".cg")
                    sums = tl.load(theirs + padded, mask=real, other=0.0, cache_modifier=".cg")
                    pieces = tl.load(
                        first + (number * size)[:, None, None] + spot[None, :, :],
                        mask=real[:, :, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    now = tl.maximum(most, tl.max(peaks, 0))
                    fade, weights = tl.exp2(most - now), tl.exp2(peaks - now[None, :])
                    total = total * fade + tl.sum(sums * weights, 0)
                    weighted = weighted * fade[:, None] + tl.sum(pieces * weights[:, :, None], 0)
                    most = now
                tl.store(counter, 0)
        if last:
            there = (row * kv_heads + head) * group * width + query[:, None] * width + at[None, :]
            answer = (weighted / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + there, answer, mask=(query < group)[:, None] & (at >= 0)[None, :])


def supports_head(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel supports this head dim and dtype."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0 and dtype != torch.float64


def attend_cached(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    counters: Tensor,
    *,
    config: AttentionConfig | None = None,
    prefetch: Prefetch | None = None,
    early: bool = True,
) -> Tensor:
    """Return the attention output of each row's new token, (rows, heads * head_dim), and write its key and value.

    `qkv` (rows, features) has the queries of all heads, then keys, then values; the tables (positions, head_dim / 2)
    are fp32. The caches are (rows, kv heads, slots, head_dim), and `positions` (rows) are those of the new tokens,
    which attend to all earlier slots. `counters` come from `make_counters`. `early`: positions are loaded, and the
    beginning of the cache prefetched, before the wait of [Note: programmatic dependent launch]. This requires that at
    least one kernel (the one that writes `qkv`) was launched between the kernel that wrote the positions and this one.
    """
    rows, kv_heads, slots, width = keys.shape
    fits = rows * kv_heads <= len(counters) and keys.is_contiguous() and values.is_contiguous()
    if not (implementation("decode", qkv) == "plait" and supports_head(width, qkv.dtype) and fits):
        return attend_cached_plain(qkv, cos, sin, keys, values, positions)
    heads = qkv.shape[1] // width - 2 * kv_heads
    group = heads // kv_heads
    padded = max(16, 1 << (group - 1).bit_length())
    config = config or (MANY_ROWS_CONFIG if rows * kv_heads > MANY_PROGRAMS else DEFAULT_CONFIG)
    splits = min(-(-slots // config.tokens), max(1, config.programs // (rows * kv_heads)))
    out = qkv.new_empty(rows, heads * width)
    size = rows * kv_heads * splits * padded * (width + 2) if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=qkv.device)
    with on_device_of(qkv):
        _kernel[(rows, kv_heads, splits)](
            qkv,
            cos,
            sin,
            keys,
            values,
            positions,
            out,
            partial,
            counters,
            kv_heads,
            slots,
            math.log2(math.e) / math.sqrt(width),
            splits,
            **prefetch_options(qkv, prefetch),
            group=group,
            padded=padded,
            width=width,
            tokens=config.tokens if qkv.itemsize == 2 else 32,
            early=early,
            num_warps=config.warps,
            num_stages=config.stages,
            **dependent_launch_options(uses_dependent_launch(qkv)),
        )
    return out


def attend_cached_plain(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor
) -> Tensor:
    """Return what `attend_cached` returns, by torch operations."""
    rows, kv_heads, slots, width = keys.shape
    vectors = qkv.view(rows, -1, 1, width)
    q, k, v = vectors[:, : -2 * kv_heads], vectors[:, -2 * kv_heads : -kv_heads], vectors[:, -kv_heads:]
    table = cos[positions][:, None], sin[positions][:, None]
    q, k = apply_rotary_plain(q, *table), apply_rotary_plain(k, *table)
    number = torch.arange(rows, device=qkv.device)
    keys[number, :, positions], values[number, :, positions] = k[:, :, 0], v[:, :, 0]
    seen = torch.arange(slots, device=qkv.device) <= positions[:, None]
    # The queries of a group are passed as tokens of one head: no key or value has to be repeated.
    grouped = q.reshape(rows, kv_heads, -1, width)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None]).reshape(rows, -1)
