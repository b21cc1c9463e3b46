"""Few rows times large weights, as a decoder has them while it writes: what matters is that weights are read fast.

[Note: a stream carries its norm] An RMSNorm is a gain for each feature and a factor for each row. Who writes the
residual stream writes it a second time, times the gain of the norm that comes next, and its sums of squares. Who reads
it multiplies that with a weight, and the result with the factor. So a norm takes no pass of its own, and nothing is
computed between reading and multiplying. Numbers of 16 bits must have the range of fp32 for it, as bf16 has.

Nothing here has gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops import skinny_kernel as kernels
from plait.ops.chain import AHEAD, Ahead, ahead_options, chain_options, is_chained
from plait.ops.rms_norm import rms_norm
from plait.ops.swiglu import product_of
from plait.ops.triton import has_kernels, on_device_of

MOST_ROWS, MOST_WEIGHTS = 128, 3
"""What the kernels take."""
MOST_ROWS_WIDE = 16
"""Of fp32, which they multiply one by one."""
COUNTERS = 4096
"""Tiles that programs may share, see [Note: the last one adds up]."""


class Norm(NamedTuple):
    """An RMSNorm: its weight, and what keeps it from dividing by zero."""

    weight: Tensor
    eps: float


class Stream(NamedTuple):
    """The residual stream in front of a norm; see [Note: a stream carries its norm]."""

    x: Tensor
    """(rows, width)"""
    norm: Norm
    gained: Tensor | None = None
    """`x` times the norm's weight."""
    squares: Tensor | None = None
    """Sums of squares of each row, in pieces (pieces, rows), fp32."""

    def normed(self) -> Tensor:
        """The norm itself."""
        return rms_norm(self.x, *self.norm)

    def readable(self) -> tuple[Tensor, Tensor | None]:
        """What is multiplied, and sums of squares where the norm is not done yet."""
        return (self.normed(), None) if self.gained is None else (self.gained, self.squares)


class Tiles(NamedTuple):
    """How a kernel cuts its work up."""

    n: int
    """Features of a tile."""
    k: int
    """Numbers of 16 bits that are added up at a time."""
    warps: int
    stages: int
    programs: int = 0
    """Where tiles are fewer, programs share them, up to so many."""


Table = Mapping[tuple[str, int], Tiles | None]
TILES: Table = MappingProxyType(
    {
        ("project", 16): Tiles(n=32, k=256, warps=4, stages=4, programs=132),
        ("project", 32): Tiles(n=32, k=256, warps=4, stages=4, programs=132),
        ("project", 64): Tiles(n=32, k=128, warps=4, stages=4, programs=132),
        ("project", 128): Tiles(n=32, k=128, warps=4, stages=4, programs=132),
        ("add", 16): Tiles(n=16, k=128, warps=2, stages=4, programs=528),
        ("add", 32): Tiles(n=32, k=128, warps=4, stages=4, programs=264),
        ("add", 64): Tiles(n=32, k=128, warps=4, stages=4, programs=264),
        ("add", 128): Tiles(n=32, k=128, warps=4, stages=4, programs=132),
        ("wide", 16): Tiles(n=64, k=128, warps=4, stages=4),
        ("wide", 32): Tiles(n=128, k=256, warps=4, stages=2),
        ("wide", 64): Tiles(n=256, k=64, warps=4, stages=5),
        ("wide", 128): Tiles(n=256, k=64, warps=8, stages=4),
        ("gated", 16): Tiles(n=64, k=128, warps=4, stages=4),
        ("gated", 32): Tiles(n=64, k=128, warps=4, stages=4),
        ("gated", 64): Tiles(n=64, k=64, warps=4, stages=6),
        ("gated", 128): Tiles(n=64, k=64, warps=4, stages=6),
    }
)
"""For each form and number of rows, found on an H200 by `benchmarks/skinny.py`. Nothing: torch's own operations."""
WIDE = 16384
"""From so many features on there are tiles enough for any device."""
EARLY = True
"""See [Note: early loads] in `skinny_kernel`."""


def make_counters(device: torch.device) -> Tensor:
    """What `project` and `add` count with; one tensor serves all launches of one CUDA stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def project(
    stream: Stream,
    weights: Sequence[Tensor],
    counters: Tensor,
    *,
    table: Table = TILES,
    ahead: Ahead | None = None,
    early: bool = EARLY,
) -> Tensor:
    """The norm of the stream times each weight (features, width), side by side."""
    form = "wide" if sum(map(len, weights)) >= WIDE else "project"
    tiles = tiles_for(form, stream.x, weights, table)
    if tiles is None:
        return project_plain(stream, weights)
    x, squares = stream.readable()
    out = x.new_empty(len(x), sum(map(len, weights)))
    _launch(x, squares, stream.norm.eps, weights, tiles, counters, out, ahead=ahead, early=early)
    return out


def project_plain(stream: Stream, weights: Sequence[Tensor]) -> Tensor:
    """The plain twin."""
    x = stream.normed()
    return torch.cat([F.linear(x, weight) for weight in weights], dim=1)


def add(
    stream: Stream,
    y: Tensor,
    weight: Tensor,
    norm: Norm,
    counters: Tensor,
    *,
    table: Table = TILES,
    ahead: Ahead | None = None,
    early: bool = EARLY,
) -> Stream:
    """The stream plus `y` (rows, features) times a weight (width, features), in front of its next norm.

    In a chain, a kernel must lie between what wrote the stream and this: that of `y`.
    """
    tiles = tiles_for("add", y, [weight], table)
    if tiles is None:
        return add_plain(stream, y, weight, norm)
    x, gained = (torch.empty_like(stream.x) for _ in range(2))
    squares = torch.empty(-(-len(weight) // tiles.n), len(x), dtype=torch.float32, device=x.device)
    after = Stream(x, norm, gained, squares)
    _launch(y, None, 0.0, [weight], tiles, counters, x, stream.x, after, ahead=ahead, early=early)
    return after


def add_plain(stream: Stream, y: Tensor, weight: Tensor, norm: Norm) -> Stream:
    """The plain twin."""
    return Stream(stream.x + F.linear(y, weight), norm)


def gated(
    stream: Stream,
    gate: Tensor,
    up: Tensor,
    *,
    table: Table = TILES,
    ahead: Ahead | None = None,
    early: bool = EARLY,
) -> Tensor:
    """`silu(x gateᵀ) * (x upᵀ)`, of the stream's norm and weights (features, width)."""
    tiles = tiles_for("gated", stream.x, (gate, up), table)
    if tiles is None:
        return gated_plain(stream, gate, up)
    x, squares = stream.readable()
    (rows, width), features = x.shape, len(gate)
    out = x.new_empty(rows, features)
    with on_device_of(x):
        kernels.gated_kernel[(-(-features // tiles.n),)](
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
            **ahead_options(x, ahead),
            is_normed=squares is not None,
            early=early,
            **launch_options(tiles, x),
        )
    return out


def gated_plain(stream: Stream, gate: Tensor, up: Tensor) -> Tensor:
    """The plain twin."""
    x = stream.normed()
    return product_of(F.linear(x, gate), F.linear(x, up))


def _launch(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weights: Sequence[Tensor],
    tiles: Tiles,
    counters: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    after: Stream | None = None,
    *,
    ahead: Ahead | None,
    early: bool,
) -> None:
    assert len(weights) <= MOST_WEIGHTS
    (rows, width), block_m, block_k = x.shape, padded(len(x)), depth_of(tiles, x)
    count, split = _shares(tiles, weights, block_k)
    partial = torch.empty(count * split * block_m * tiles.n if split > 1 else 1, dtype=torch.float32, device=x.device)
    spare = MOST_WEIGHTS - len(weights)
    with on_device_of(x):
        kernels.project_kernel[(count, split)](
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
            **ahead_options(x, ahead),
            is_normed=squares is not None,
            adds=after is not None,
            split=split,
            early=early,
            **launch_options(tiles, x),
        )


def ahead_of(form: str, rows: int, weights: Sequence[Tensor], *, table: Table = TILES, budget: int = AHEAD) -> Ahead:
    """What the next kernel begins with, by its form, the number of rows and its weights (features, width)."""
    tiles = table.get((form, padded(min(rows, MOST_ROWS))))
    if tiles is None:
        return Ahead(weights, budget=budget)
    width, depth = weights[0].shape[1], depth_of(tiles, weights[0])
    split = _shares(tiles, weights, depth)[1]
    return Ahead(weights, split, -(-width // (depth * split)) * depth, budget)


def _shares(tiles: Tiles, weights: Sequence[Tensor], depth: int) -> tuple[int, int]:
    """How many tiles there are, and how many programs share one."""
    count, split = sum(-(-len(weight) // tiles.n) for weight in weights), 1
    while 2 * split * count <= min(tiles.programs, COUNTERS) and 4 * split * depth <= weights[0].shape[1]:
        split *= 2
    return count, split


def launch_options(tiles: Tiles, x: Tensor) -> dict[str, Any]:
    """How to launch a kernel that multiplies `x` in such tiles."""
    return {
        "block_m": padded(len(x)),
        "block_n": tiles.n,
        "block_k": depth_of(tiles, x),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **chain_options(is_chained(x)),
    }


def tiles_for(form: str, x: Tensor, weights: Sequence[Tensor], table: Table) -> Tiles | None:
    """None where torch's own operations are to do it."""
    if not suits(x, *weights) or (x.itemsize > 2 and len(x) > MOST_ROWS_WIDE):
        return None
    return table.get((form, padded(len(x))))


def suits(x: Tensor, *weights: Tensor) -> bool:
    """Whether kernels can multiply an input with such weights."""
    if not has_kernels(x) or x.dtype == torch.float64 or not x.is_contiguous():
        return False
    return all(w.dtype == x.dtype and w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)


def padded(rows: int) -> int:
    """Rows of a tile."""
    return max(16, power_of(rows))


def power_of(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def depth_of(tiles: Tiles, x: Tensor) -> int:
    """Numbers that are added up at a time."""
    # What is multiplied one by one would be long code for deep tiles.
    return tiles.k if x.itemsize == 2 else 32
