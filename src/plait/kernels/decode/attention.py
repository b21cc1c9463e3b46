"""Attention of one new token a row over a cache: positions, cache and attention in one pass.

[Note: the new token] Its query and key are turned on the way in, and its key and value are written to the cache by the
first program of each head. Nobody reads them back in this pass: that program has them at hand, and all others stop
before the row's end. Queries of a group share what is read of the cache.

Rows that are long, in a batch that is small, are read by several programs each; see [Note: the last one adds up].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels.decode.dependent_launch import Ahead, ahead_options, dependent_launch_options, is_chained
from plait.kernels.rotary import apply_rotary_plain
from plait.kernels.triton import HAS_TRITON, has_kernels, on_device_of


class Looks(NamedTuple):
    """How a program goes along a row."""

    tokens: int
    """Places of the cache that it looks at at a time."""
    warps: int
    stages: int
    programs: int = 528
    """Rows are split until there are about so many: four for each part of a large device."""


USUAL, CROWDED = Looks(tokens=64, warps=4, stages=3), Looks(tokens=32, warps=4, stages=4)
"""Six programs of the first kind fit into each part of an H200 and eight of the second, which go in smaller steps."""
CROWD = 6 * 132
"""More programs than this would have to wait for others."""
EARLY = True
"""Whether the places are read, and what they lead to is asked for, before the wait of [Note: chained kernels]."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import NO_KEYS, ask_for, follow, plan_here

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _turned(x, at, half, c, s):  # type: ignore[no-untyped-def]
        """Vectors of 2 * half features at `x`, each pair turned by its angle; rounded as they were."""
        value = tl.load(x + at).to(tl.float32)
        other = tl.load(x + (at + half) % (2 * half)).to(tl.float32)
        return (value * c + tl.where(at < half, -other, other) * s).to(x.dtype.element_ty)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _share(place, splits, tokens):  # type: ignore[no-untyped-def]
        """How often a program looks, where so many share what lies before a place."""
        return tl.maximum(tl.cdiv(tl.cdiv(place, tokens), splits), 1)

    @triton.jit(do_not_specialize=["splits", *NO_KEYS])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        mixed,
        cos,
        sin,
        keys,
        values,
        places,
        out,
        partial,
        counters,
        kv_heads,
        slots,
        scale,
        splits,
        ahead_first,
        ahead_second,
        ahead_third,
        ahead_n_first,
        ahead_n_second,
        ahead_n_third,
        ahead_width,
        ahead_stride,
        ahead_part_bits,
        ahead_line_bits,
        group: tl.constexpr,
        padded: tl.constexpr,
        width: tl.constexpr,
        tokens: tl.constexpr,
        chained: tl.constexpr,
        early: tl.constexpr,
        looks: tl.constexpr,
    ):
        """One program for a group of heads of a row, and a part of its places."""
        row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        base = (row * kv_heads + head) * slots * width
        if early:
            place = tl.load(places + row, cache_modifier=".cg").to(tl.int32)
            if chained:  # what the row has had so far is there
                token = part * _share(place, splits, tokens) * tokens + tl.arange(0, tokens)
                ask_for(keys + base, tl.minimum(token, place), 0, width, width, (width + 63) // 64)
                ask_for(values + base, tl.minimum(token, place), 0, width, width, (width + 63) // 64)
        if looks:
            plan_here(
                ahead_first,
                ahead_second,
                ahead_third,
                ahead_n_first,
                ahead_n_second,
                ahead_n_third,
                ahead_width,
                ahead_stride,
                ahead_part_bits,
                ahead_line_bits,
                tl.program_id(0) + tl.num_programs(0) * (head + kv_heads * part),
                tl.num_programs(0) * kv_heads * splits,
            )
        if chained:
            follow()
        if not early:
            place = tl.load(places + row).to(tl.int32)
        each = _share(place, splits, tokens)
        parts = tl.maximum(tl.cdiv(tl.cdiv(place, tokens), each), 1)
        if part >= parts:
            return
        at, query = tl.arange(0, width), tl.arange(0, padded)
        own = mixed + row * ((group + 2) * kv_heads * width)
        half: tl.constexpr = width // 2
        c = tl.load(cos + place * half + at % half)
        s = tl.load(sin + place * half + at % half)
        # Queries beyond the group are copies of its last one; nobody asks for what they find.
        own_query = tl.minimum(query, group - 1)
        q = _turned(own + (head * group + own_query)[:, None] * width, at[None, :], half, c[None, :], s[None, :])
        k_new = _turned(own + (group * kv_heads + head) * width, at, half, c, s)
        v_new = tl.load(own + ((group + 1) * kv_heads + head) * width + at)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        is_first = part == 0
        if is_first:
            tl.store(keys + base + place * width + at, k_new)
            tl.store(values + base + place * width + at, v_new)
        most = tl.where(is_first, score, float("-inf"))
        total = tl.where(is_first, score * 0.0 + 1.0, 0.0)
        found = tl.where(is_first, v_new.to(tl.float32)[None, :] + tl.zeros((padded, width), dtype=tl.float32), 0.0)
        end = tl.minimum((part + 1) * each * tokens, place)
        for begin in range(part * each * tokens, end, tokens):
            token = begin + tl.arange(0, tokens)
            here = base + token[:, None] * width + at[None, :]
            inside = token < end
            k = tl.load(keys + here, mask=inside[:, None], other=0.0)
            v = tl.load(values + here, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            now = tl.maximum(most, tl.max(scores, 1))
            chance = tl.exp2(scores - now[:, None])
            fade = tl.exp2(most - now)
            total = total * fade + tl.sum(chance, 1)
            found = tl.dot(chance.to(v.dtype), v, found * fade[:, None], input_precision="ieee")
            most = now
        last = True
        if parts > 1:  # see [Note: the last one adds up]
            size: tl.constexpr = padded * (width + 2)
            first = partial + ((row * kv_heads + head) * splits) * size
            mine = first + part * size
            spot = query[:, None] * width + at[None, :]
            tl.store(mine + spot, found)
            tl.store(mine + padded * width + query, most)
            tl.store(mine + padded * (width + 1) + query, total)
            tl.debug_barrier()
            counter = counters + row * kv_heads + head
            last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
            if last:
                most = tl.full((padded,), float("-inf"), dtype=tl.float32)
                total = tl.zeros((padded,), dtype=tl.float32)
                found = tl.zeros((padded, width), dtype=tl.float32)
                for begin in range(0, parts, 2):  # two at once: each would be waited for in turn
                    number = begin + tl.arange(0, 2)
                    real = (number < parts)[:, None]
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
                    found = found * fade[:, None] + tl.sum(pieces * weights[:, :, None], 0)
                    most = now
                tl.store(counter, 0)
        if last:
            there = (row * kv_heads + head) * group * width + query[:, None] * width + at[None, :]
            answer = (found / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + there, answer, mask=(query < group)[:, None] & (at >= 0)[None, :])


def takes(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is for such heads."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0 and dtype != torch.float64


def attend_cached(
    mixed: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    counters: Tensor,
    *,
    looks: Looks | None = None,
    ahead: Ahead | None = None,
    early: bool = EARLY,
) -> Tensor:
    """What each row's new token finds, (rows, heads * head_dim); its key and value are in the cache afterwards.

    `mixed` (rows, features) has the queries of all heads, then keys, then values; the tables (positions, head_dim / 2)
    are fp32. The caches are (rows, kv heads, slots, head_dim), and `places` (rows) where the new tokens belong: all
    before that is seen. `counters` are `make_counters` of `skinny`. In a chain, a kernel must lie between what wrote
    the places and this: that of `mixed`.
    """
    rows, kv_heads, slots, width = keys.shape
    fits = rows * kv_heads <= len(counters) and keys.is_contiguous() and values.is_contiguous()
    if not (has_kernels(mixed) and takes(width, mixed.dtype) and fits):
        return attend_cached_plain(mixed, cos, sin, keys, values, places)
    heads = mixed.shape[1] // width - 2 * kv_heads
    group = heads // kv_heads
    padded = max(16, 1 << (group - 1).bit_length())
    looks = looks or (CROWDED if rows * kv_heads > CROWD else USUAL)
    splits = min(-(-slots // looks.tokens), max(1, looks.programs // (rows * kv_heads)))
    out = mixed.new_empty(rows, heads * width)
    size = rows * kv_heads * splits * padded * (width + 2) if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=mixed.device)
    with on_device_of(mixed):
        _kernel[(rows, kv_heads, splits)](
            mixed,
            cos,
            sin,
            keys,
            values,
            places,
            out,
            partial,
            counters,
            kv_heads,
            slots,
            math.log2(math.e) / math.sqrt(width),
            splits,
            **ahead_options(mixed, ahead),
            group=group,
            padded=padded,
            width=width,
            tokens=looks.tokens if mixed.itemsize == 2 else 32,
            early=early,
            num_warps=looks.warps,
            num_stages=looks.stages,
            **dependent_launch_options(is_chained(mixed)),
        )
    return out


def attend_cached_plain(
    mixed: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, places: Tensor
) -> Tensor:
    """The plain twin."""
    rows, kv_heads, slots, width = keys.shape
    vectors = mixed.view(rows, -1, 1, width)
    q, k, v = vectors[:, : -2 * kv_heads], vectors[:, -2 * kv_heads : -kv_heads], vectors[:, -kv_heads:]
    table = cos[places][:, None], sin[places][:, None]
    q, k = apply_rotary_plain(q, *table), apply_rotary_plain(k, *table)
    number = torch.arange(rows, device=mixed.device)
    keys[number, :, places], values[number, :, places] = k[:, :, 0], v[:, :, 0]
    seen = torch.arange(slots, device=mixed.device) <= places[:, None]
    # The queries of a group stand in for tokens of one head: no key or value is repeated for them.
    grouped = q.reshape(rows, kv_heads, -1, width)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None]).reshape(rows, -1)
