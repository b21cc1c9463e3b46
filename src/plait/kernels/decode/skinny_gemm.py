"""Skinny GEMMs: multiplication of few rows with a large weight; reading the weight takes most time. No gradients.

[Note: a stream carries its norm] An RMSNorm multiplies by a factor per feature (its weight) and a factor per row (from
the row's sum of squares). The kernel that writes the residual stream also writes the stream times the next norm's
weight, and the sums of squares. The next kernel multiplies the former with its weight matrix, and then each row of the
result with the factor of the row. So a norm needs no kernel of its own, and nothing is computed between loading the
input and multiplying it. The input is not normalized then, so a 16-bit dtype must have the range of fp32, as bf16 has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels import HAS_TRITON, implementation, on_device_of, product_of, rms_norm
from plait.kernels.decode.dependent_launch import (
    PREFETCH_BYTES,
    Prefetch,
    dependent_launch_options,
    prefetch_options,
    uses_dependent_launch,
)

# [Note: the last program reduces] Where there are too few tiles of the output to keep the device busy, several programs
# compute one tile, each for a part of the dim that is summed over (split-K). Each stores its sums in `partial` and
# increments the tile's counter. The program that increments it last adds up all sums, always in the same order, and
# resets the counter for the next launch.
#
# [Note: early loads] Values that are needed after the multiplication are loaded before it, so that they arrive
# meanwhile. The residual stream to which the result is added was written at least two kernels before, so it is loaded
# even before the wait of [Note: programmatic dependent launch].


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
    def _rows(x, row, at, rows, width):  # type: ignore[no-untyped-def]
        """Load a tile of the input (rows, width)."""
        inside = (row < rows)[:, None] & (at < width)[None, :]
        return tl.load(x + row.to(tl.int64)[:, None] * width + at[None, :], mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _piece(weight, column, at, width):  # type: ignore[no-untyped-def]
        """Load a tile of a weight (features, width); each is read only once, so the L2 cache may evict it first."""
        address = weight + column.to(tl.int64)[:, None] * width + at[None, :]
        return tl.load(address, mask=(at < width)[None, :], other=0.0, eviction_policy="evict_first")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def squares_of(squares, begin, pieces, row, rows, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load a block of the sums of squares (pieces, rows): a piece is a part of a row's features."""
        at_once: tl.constexpr = 2048 // block_m if block_m <= 32 else 4096 // block_m
        piece = begin + tl.arange(0, at_once)
        inside = (piece < pieces)[:, None] & (row < rows)[None, :]
        return tl.load(squares + piece[:, None] * rows + row[None, :], mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def scale_of(begun, squares, pieces, row, rows, width, eps, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the RMSNorm's factor per row, from the sums of squares, of which `begun` is the first block."""
        total = tl.sum(begun, 0)
        for begin in range(begun.shape[0], pieces, begun.shape[0]):
            total += tl.sum(squares_of(squares, begin, pieces, row, rows, block_m), 0)
        return 1.0 / tl.sqrt(total / width + eps)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _load_residual(residual, gain, offset, column, inside):  # type: ignore[no-untyped-def]
        """Load the residual stream to which a result is added, and the weight of the next norm."""
        value = tl.load(residual + offset, mask=inside, other=0.0, cache_modifier=".cg")
        return value.to(tl.float32), tl.load(gain + column).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def skinny_product_of(  # type: ignore[no-untyped-def]
        x,
        weight,
        row,
        column,
        first,
        last,
        rows,
        width,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
    ):
        """Return a tile of `x @ weight.T`, summed over the steps `first` to `last`, of `block_k` features each."""
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(first, last):
            at = step * block_k + tl.arange(0, block_k)
            value, piece = _rows(x, row, at, rows, width), _piece(weight, column, at, width)
            total = tl.dot(value, tl.trans(piece), total, input_precision="ieee")
        return total

    @triton.jit(do_not_specialize=["rows", "pieces", *PREFETCH_ARGUMENTS])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def project_kernel(  # type: ignore[no-untyped-def]
        x,
        squares,
        first,
        second,
        third,
        residual,
        gain,
        out,
        gained,
        new_squares,
        partial,
        counters,
        rows,
        width,
        n_first,
        n_second,
        n_third,
        pieces,
        eps,
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
        is_normed: tl.constexpr,
        adds: tl.constexpr,
        split: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        dependent: tl.constexpr,
        early: tl.constexpr,
        prefetches: tl.constexpr,
    ):
        """Multiply with up to three weights; one program per tile of a weight, and part of the dim summed over."""
        tile, split_index = tl.program_id(0), tl.program_id(1)
        weight, features, begin, weight_tile = first, n_first, 0, tile
        if weight_tile >= tl.cdiv(n_first, block_n):
            weight_tile -= tl.cdiv(n_first, block_n)
            weight, features, begin = second, n_second, n_first
            if weight_tile >= tl.cdiv(n_second, block_n):
                weight_tile -= tl.cdiv(n_second, block_n)
                weight, features, begin = third, n_third, n_first + n_second
        weight = tl.multiple_of(weight, 16)
        row, column = tl.arange(0, block_m), weight_tile * block_n + tl.arange(0, block_n)
        safe = tl.minimum(column, features - 1)
        offset = row.to(tl.int64)[:, None] * (n_first + n_second + n_third) + (begin + column)[None, :]
        inside = (row < rows)[:, None] & (column < features)[None, :]
        steps = tl.cdiv(tl.cdiv(width, block_k), split)
        if adds and early:  # see [Note: early loads]
            residual_value, factor = _load_residual(residual, gain, offset, safe, inside)
        if dependent:  # see [Note: programmatic dependent launch]
            prefetch_rows(
                weight,
                safe,
                split_index * steps * block_k,
                tl.minimum((split_index + 1) * steps * block_k, width),
                width,
                16,
            )
            wait_for_previous()
        if is_normed and early:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
        total = skinny_product_of(
            x, weight, row, safe, split_index * steps, (split_index + 1) * steps, rows, width, block_m, block_n, block_k
        )
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
                tile + split_index * tl.num_programs(0),
                tl.num_programs(0) * split,
            )
        last = True
        if split > 1:  # see [Note: the last program reduces]
            size: tl.constexpr = block_m * block_n
            partial_offset = row[:, None] * block_n + tl.arange(0, block_n)[None, :]
            tl.store(partial + (tile * split + split_index).to(tl.int64) * size + partial_offset, total)
            tl.debug_barrier()
            last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
            if last:
                total = tl.zeros((block_m, block_n), dtype=tl.float32)
                theirs = partial + (tile * split).to(tl.int64) * size + partial_offset
                for other in tl.static_range(split):
                    total += tl.load(theirs + other * size, cache_modifier=".cg")
                tl.store(counters + tile, 0)
        if last:
            if is_normed:
                if not early:
                    begun = squares_of(squares, 0, pieces, row, rows, block_m)
                total *= scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
            dtype = out.dtype.element_ty
            if adds:
                if not early:
                    residual_value, factor = _load_residual(residual, gain, offset, safe, inside)
                # Rounded before and after the addition, as separate layers would do.
                total = (total.to(dtype).to(tl.float32) + residual_value).to(dtype).to(tl.float32)
                tl.store(gained + offset, (total * factor[None, :]).to(dtype), mask=inside)
                squared = tl.sum(tl.where(inside, total * total, 0.0), 1)
                tl.store(new_squares + tile * rows + row, squared, mask=row < rows)
            tl.store(out + offset, total.to(dtype), mask=inside)

    @triton.jit(do_not_specialize=["rows", "pieces", *PREFETCH_ARGUMENTS])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def gated_kernel(  # type: ignore[no-untyped-def]
        x,
        squares,
        gate,
        up,
        out,
        rows,
        width,
        features,
        pieces,
        eps,
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
        is_normed: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        dependent: tl.constexpr,
        early: tl.constexpr,
        prefetches: tl.constexpr,
    ):
        """Compute silu(gate) * up; one program per tile, for both weights."""
        row, k = tl.arange(0, block_m), tl.arange(0, block_k)
        column = tl.program_id(0) * block_n + tl.arange(0, block_n)
        safe = tl.minimum(column, features - 1)
        g = tl.zeros((block_m, block_n), dtype=tl.float32)
        u = tl.zeros((block_m, block_n), dtype=tl.float32)
        if dependent:  # see [Note: programmatic dependent launch]
            prefetch_rows(gate, safe, 0, width, width, 16)
            prefetch_rows(up, safe, 0, width, width, 16)
            wait_for_previous()
        if is_normed and early:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
        for step in range(tl.cdiv(width, block_k)):
            at = step * block_k + k
            value = _rows(x, row, at, rows, width)
            g = tl.dot(value, tl.trans(_piece(gate, safe, at, width)), g, input_precision="ieee")
            u = tl.dot(value, tl.trans(_piece(up, safe, at, width)), u, input_precision="ieee")
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
                tl.program_id(0),
                tl.num_programs(0),
            )
        if is_normed:
            if not early:
                begun = squares_of(squares, 0, pieces, row, rows, block_m)
            scale = scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
            g, u = g * scale, u * scale
        offset = row.to(tl.int64)[:, None] * features + column[None, :]
        inside = (row < rows)[:, None] & (column < features)[None, :]
        tl.store(out + offset, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


MOST_ROWS, MOST_WEIGHTS = 128, 3
"""The maximum numbers of rows and of weights that the kernels support."""
MOST_ROWS_WIDE = 16
"""The maximum number of rows in fp32, which is multiplied without tensor cores."""
COUNTERS = 4096
"""The maximum number of tiles that several programs share; see [Note: the last program reduces]."""


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor
    eps: float


class ResidualStream(NamedTuple):
    """The residual stream before a norm; see [Note: a stream carries its norm]."""

    x: Tensor
    """(rows, width)"""
    norm: Norm
    gained: Tensor | None = None
    """`x` times the norm's weight."""
    squares: Tensor | None = None
    """Sums of squares of each row, in pieces (pieces, rows), fp32."""

    def normed(self) -> Tensor:
        """Return the normalized stream."""
        return rms_norm(self.x, *self.norm)

    def readable(self) -> tuple[Tensor, Tensor | None]:
        """Return the input to multiply and, if it is not normalized by the factor per row, the sums of squares."""
        return (self.normed(), None) if self.gained is None else (self.gained, self.squares)


class GemmConfig(NamedTuple):
    """Launch configuration of a kernel."""

    n: int
    """Features of a tile."""
    k: int
    """Elements, in 16 bits, that are summed over per step."""
    warps: int
    stages: int
    programs: int = 0
    """If there are fewer tiles than this, several programs share each tile, up to this many programs in all."""


ConfigTable = Mapping[tuple[str, int], GemmConfig | None]
CONFIGS: ConfigTable = MappingProxyType(
    {
        ("project", 16): GemmConfig(n=32, k=256, warps=4, stages=4, programs=132),
        ("project", 32): GemmConfig(n=32, k=256, warps=4, stages=4, programs=132),
        ("project", 64): GemmConfig(n=32, k=128, warps=4, stages=4, programs=132),
        ("project", 128): GemmConfig(n=32, k=128, warps=4, stages=4, programs=132),
        ("add", 16): GemmConfig(n=16, k=128, warps=2, stages=4, programs=528),
        ("add", 32): GemmConfig(n=32, k=128, warps=4, stages=4, programs=264),
        ("add", 64): GemmConfig(n=32, k=128, warps=4, stages=4, programs=264),
        ("add", 128): GemmConfig(n=32, k=128, warps=4, stages=4, programs=132),
        ("wide", 16): GemmConfig(n=64, k=128, warps=4, stages=4),
        ("wide", 32): GemmConfig(n=128, k=256, warps=4, stages=2),
        ("wide", 64): GemmConfig(n=256, k=64, warps=4, stages=5),
        ("wide", 128): GemmConfig(n=256, k=64, warps=8, stages=4),
        ("gated", 16): GemmConfig(n=64, k=128, warps=4, stages=4),
        ("gated", 32): GemmConfig(n=64, k=128, warps=4, stages=4),
        ("gated", 64): GemmConfig(n=64, k=64, warps=4, stages=6),
        ("gated", 128): GemmConfig(n=64, k=64, warps=4, stages=6),
    }
)
"""The fastest configuration for each operation and number of rows on an H200 (`benchmarks/skinny.py`).

For operations and numbers of rows that are not listed, torch's operations are used.
"""
WIDE = 16384
"""From this number of features on, there are enough tiles to fill any device."""
EARLY_LOADS = True
"""The default of `early`: whether values are loaded early, see [Note: early loads]."""


def make_counters(device: torch.device) -> Tensor:
    """Return the counters of `project` and `add`; one tensor is enough for all launches on one CUDA stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def project(
    stream: ResidualStream,
    weights: Sequence[Tensor],
    counters: Tensor,
    *,
    table: ConfigTable = CONFIGS,
    prefetch: Prefetch | None = None,
    early: bool = EARLY_LOADS,
) -> Tensor:
    """Return the normalized stream times each weight (features, width), concatenated along the features."""
    form = "wide" if sum(map(len, weights)) >= WIDE else "project"
    config = config_for(form, stream.x, weights, table)
    if config is None:
        return project_plain(stream, weights)
    x, squares = stream.readable()
    out = x.new_empty(len(x), sum(map(len, weights)))
    _launch(x, squares, stream.norm.eps, weights, config, counters, out, prefetch=prefetch, early=early)
    return out


def project_plain(stream: ResidualStream, weights: Sequence[Tensor]) -> Tensor:
    """Return what `project` returns, by torch operations."""
    x = stream.normed()
    return torch.cat([F.linear(x, weight) for weight in weights], dim=1)


def add(
    stream: ResidualStream,
    y: Tensor,
    weight: Tensor,
    norm: Norm,
    counters: Tensor,
    *,
    table: ConfigTable = CONFIGS,
    prefetch: Prefetch | None = None,
    early: bool = EARLY_LOADS,
) -> ResidualStream:
    """Return the stream plus `y` (rows, features) times a weight (width, features), for its next norm.

    With dependent launch, at least one kernel (the one that writes `y`) must be launched between the one that wrote the
    stream and this one.
    """
    config = config_for("add", y, [weight], table)
    if config is None:
        return add_plain(stream, y, weight, norm)
    x, gained = (torch.empty_like(stream.x) for _ in range(2))
    squares = torch.empty(-(-len(weight) // config.n), len(x), dtype=torch.float32, device=x.device)
    after = ResidualStream(x, norm, gained, squares)
    _launch(y, None, 0.0, [weight], config, counters, x, stream.x, after, prefetch=prefetch, early=early)
    return after


def add_plain(stream: ResidualStream, y: Tensor, weight: Tensor, norm: Norm) -> ResidualStream:
    """Return what `add` returns, by torch operations."""
    return ResidualStream(stream.x + F.linear(y, weight), norm)


def gated(
    stream: ResidualStream,
    gate: Tensor,
    up: Tensor,
    *,
    table: ConfigTable = CONFIGS,
    prefetch: Prefetch | None = None,
    early: bool = EARLY_LOADS,
) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)`, where `x` is the normalized stream; weights are (features, width)."""
    config = config_for("gated", stream.x, (gate, up), table)
    if config is None:
        return gated_plain(stream, gate, up)
    x, squares = stream.readable()
    (rows, width), features = x.shape, len(gate)
    out = x.new_empty(rows, features)
    with on_device_of(x):
        gated_kernel[(-(-features // config.n),)](
            x,
            x if squares is None else squares,
            gate,
            up,
            out,
            rows,
            width,
            features,
            0 if squares is None else len(squares),
            stream.norm.eps,
            **prefetch_options(x, prefetch),
            is_normed=squares is not None,
            early=early,
            **launch_options(config, x),
        )
    return out


def gated_plain(stream: ResidualStream, gate: Tensor, up: Tensor) -> Tensor:
    """Return what `gated` returns, by torch operations."""
    x = stream.normed()
    return product_of(F.linear(x, gate), F.linear(x, up))


def _launch(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weights: Sequence[Tensor],
    config: GemmConfig,
    counters: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    after: ResidualStream | None = None,
    *,
    prefetch: Prefetch | None,
    early: bool,
) -> None:
    assert len(weights) <= MOST_WEIGHTS
    (rows, width), block_m, block_k = x.shape, padded_rows(len(x)), block_k_of(config, x)
    count, split = _tiles_and_splits(config, weights, block_k)
    partial = torch.empty(count * split * block_m * config.n if split > 1 else 1, dtype=torch.float32, device=x.device)
    spare = MOST_WEIGHTS - len(weights)
    with on_device_of(x):
        project_kernel[(count, split)](
            x,
            x if squares is None else squares,
            *weights,
            *[weights[0]] * spare,
            x if residual is None else residual,
            x if after is None else after.norm.weight,
            out,
            out if after is None else after.gained,
            out if after is None else after.squares,
            partial,
            counters,
            rows,
            width,
            *map(len, weights),
            *[0] * spare,
            0 if squares is None else len(squares),
            eps,
            **prefetch_options(x, prefetch),
            is_normed=squares is not None,
            adds=after is not None,
            split=split,
            early=early,
            **launch_options(config, x),
        )


def prefetch_of(
    form: str, rows: int, weights: Sequence[Tensor], *, table: ConfigTable = CONFIGS, budget: int = PREFETCH_BYTES
) -> Prefetch:
    """Return what the next kernel reads first, given its form, the number of rows and its weights (features, width)."""
    config = table.get((form, padded_rows(min(rows, MOST_ROWS))))
    if config is None:
        return Prefetch(weights, budget=budget)
    width, depth = weights[0].shape[1], block_k_of(config, weights[0])
    split = _tiles_and_splits(config, weights, depth)[1]
    return Prefetch(weights, split, -(-width // (depth * split)) * depth, budget)


def _tiles_and_splits(config: GemmConfig, weights: Sequence[Tensor], depth: int) -> tuple[int, int]:
    """Return the number of tiles, and the number of programs that share each."""
    count, split = sum(-(-len(weight) // config.n) for weight in weights), 1
    while 2 * split * count <= min(config.programs, COUNTERS) and 4 * split * depth <= weights[0].shape[1]:
        split *= 2
    return count, split


def launch_options(config: GemmConfig, x: Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel that multiplies `x`."""
    return {
        "block_m": padded_rows(len(x)),
        "block_n": config.n,
        "block_k": block_k_of(config, x),
        "num_warps": config.warps,
        "num_stages": config.stages,
        **dependent_launch_options(uses_dependent_launch(x)),
    }


def config_for(form: str, x: Tensor, weights: Sequence[Tensor], table: ConfigTable) -> GemmConfig | None:
    """Return the launch configuration; None if torch's operations are to be used."""
    if not supports(x, *weights) or (x.itemsize > 2 and len(x) > MOST_ROWS_WIDE):
        return None
    return table.get((form, padded_rows(len(x))))


def supports(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels can multiply this input with these weights."""
    if implementation("decode", x) == "torch" or not x.is_contiguous():
        return False
    return all(w.dtype == x.dtype and w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)


def padded_rows(rows: int) -> int:
    """Return the number of rows of a tile."""
    return max(16, next_power_of_two(rows))


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def block_k_of(config: GemmConfig, x: Tensor) -> int:
    """Return the number of elements that are summed over per step."""
    # In fp32, without tensor cores, the loop over a tile is unrolled: a deeper tile would mean very long code.
    return config.k if x.itemsize == 2 else 32
