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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops import skinny_kernel as kernels
from plait.ops.chain import chain_options
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


def make_counters(device: torch.device) -> Tensor:
    """What `project` and `add` count with; one tensor serves all launches of one CUDA stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def look_up(tokens: Tensor, embedding: Tensor, norm: Norm) -> Stream:
    """The rows of an embedding that the tokens name."""
    if not _suits(embedding, embedding) or len(tokens) > MOST_ROWS:
        return Stream(F.embedding(tokens, embedding), norm)
    rows, width = len(tokens), embedding.shape[1]
    x, gained = (embedding.new_empty(rows, width) for _ in range(2))
    squares = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        kernels.lookup_kernel[(rows,)](
            tokens, embedding, norm.weight, x, gained, squares, width, block=_power(width), num_warps=8
        )
    return Stream(x, norm, gained, squares)


def project(stream: Stream, weights: Sequence[Tensor], counters: Tensor, *, table: Table = TILES) -> Tensor:
    """The norm of the stream times each weight (features, width), side by side."""
    form = "wide" if sum(map(len, weights)) >= WIDE else "project"
    tiles = _tiles(form, stream.x, weights, table)
    if tiles is None:
        return project_plain(stream, weights)
    x, squares = (stream.normed(), None) if stream.gained is None else (stream.gained, stream.squares)
    out = x.new_empty(len(x), sum(map(len, weights)))
    _launch(x, squares, stream.norm.eps, weights, tiles, counters, out)
    return out


def project_plain(stream: Stream, weights: Sequence[Tensor]) -> Tensor:
    """The plain twin."""
    x = stream.normed()
    return torch.cat([F.linear(x, weight) for weight in weights], dim=1)


def add(stream: Stream, y: Tensor, weight: Tensor, norm: Norm, counters: Tensor, *, table: Table = TILES) -> Stream:
    """The stream plus `y` (rows, features) times a weight (width, features), in front of its next norm."""
    tiles = _tiles("add", y, [weight], table)
    if tiles is None:
        return add_plain(stream, y, weight, norm)
    x, gained = (torch.empty_like(stream.x) for _ in range(2))
    squares = torch.empty(-(-len(weight) // tiles.n), len(x), dtype=torch.float32, device=x.device)
    after = Stream(x, norm, gained, squares)
    _launch(y, None, 0.0, [weight], tiles, counters, x, stream.x, after)
    return after


def add_plain(stream: Stream, y: Tensor, weight: Tensor, norm: Norm) -> Stream:
    """The plain twin."""
    return Stream(stream.x + F.linear(y, weight), norm)


def gated(stream: Stream, gate: Tensor, up: Tensor, *, table: Table = TILES) -> Tensor:
    """`silu(x gateᵀ) * (x upᵀ)`, of the stream's norm and weights (features, width)."""
    tiles = _tiles("gated", stream.x, (gate, up), table)
    if tiles is None:
        return gated_plain(stream, gate, up)
    x, squares = (stream.normed(), None) if stream.gained is None else (stream.gained, stream.squares)
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
            is_normed=squares is not None,
            block_m=_padded(rows),
            block_n=tiles.n,
            block_k=_depth(tiles, x),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **chain_options(x),
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
) -> None:
    assert len(weights) <= MOST_WEIGHTS
    (rows, width), block_m, block_k = x.shape, _padded(len(x)), _depth(tiles, x)
    count, split = sum(-(-len(weight) // tiles.n) for weight in weights), 1
    while 2 * split * count <= min(tiles.programs, COUNTERS) and 4 * split * block_k <= width:
        split *= 2
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
            is_normed=squares is not None,
            adds=after is not None,
            split=split,
            block_m=block_m,
            block_n=tiles.n,
            block_k=block_k,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **chain_options(x),
        )


def _tiles(form: str, x: Tensor, weights: Sequence[Tensor], table: Table) -> Tiles | None:
    """None where torch's own operations are to do it."""
    if not _suits(x, *weights) or (x.itemsize > 2 and len(x) > MOST_ROWS_WIDE):
        return None
    return table.get((form, _padded(len(x))))


def _suits(x: Tensor, *weights: Tensor) -> bool:
    if not has_kernels(x) or x.dtype == torch.float64 or not x.is_contiguous():
        return False
    return all(w.dtype == x.dtype and w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)


def _padded(rows: int) -> int:
    return max(16, _power(rows))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _depth(tiles: Tiles, x: Tensor) -> int:
    # What is multiplied one by one would be long code for deep tiles.
    return tiles.k if x.itemsize == 2 else 32
