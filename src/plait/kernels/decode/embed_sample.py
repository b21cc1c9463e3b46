"""The two ends of a token's way through a decoder: its vector in front of the first layer, and the choice of the next.

What stands beside them, where each row is and what the greatest logits are, takes no pass of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels.decode.dependent_launch import Ahead, ahead_options, dependent_launch_options, is_chained
from plait.kernels.decode.sampling import (
    PIECE,
    WORD_BITS,
    CounterRNG,
    Pieces,
    Weighed,
    can_weigh,
    draw,
    greedy,
    pieces_of,
    scale_at,
)
from plait.kernels.decode.skinny_gemm import (
    MOST_ROWS,
    TILES,
    WIDE,
    Norm,
    ResidualStream,
    Table,
    launch_options,
    power_of,
    project,
    suits,
    tiles_for,
)
from plait.kernels.triton import HAS_TRITON, on_device_of

# The Triton forms of `ends`.


if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import NO_KEYS, ask_for, follow, plan_here
    from plait.kernels.decode.sampling import weigh
    from plait.kernels.decode.skinny_gemm import scale_of, skinny_product_of, squares_of

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _logits(  # type: ignore[no-untyped-def]
        x,
        squares,
        weight,
        row,
        column,
        rows,
        width,
        features,
        pieces,
        eps,
        is_normed: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
    ):
        """A tile of logits, rounded as they would be written: what is chosen must not depend on who looks for it."""
        safe = tl.minimum(column, features - 1)
        if chained:  # see [Note: chained kernels]
            ask_for(weight, safe, 0, width, width, 16)
            follow()
        total = skinny_product_of(
            x, weight, row, safe, 0, tl.cdiv(width, block_k), rows, width, block_m, block_n, block_k
        )
        if is_normed:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
            total *= scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
        value = total.to(x.dtype.element_ty)
        return tl.where((column < features)[None, :], value, float("-inf"))

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def likeliest_kernel(  # type: ignore[no-untyped-def]
        x,
        squares,
        weight,
        most,
        which,
        sums,
        rows,
        width,
        features,
        pieces,
        eps,
        is_normed: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
    ):
        """One program for a tile of logits, of which it leaves what `greedy` would find in such a piece."""
        tile = tl.program_id(0)
        row, column = tl.arange(0, block_m), tile * block_n + tl.arange(0, block_n)
        value = _logits(
            x,
            squares,
            weight,
            row,
            column,
            rows,
            width,
            features,
            pieces,
            eps,
            is_normed,
            block_m,
            block_n,
            block_k,
            chained,
        ).to(tl.float32)
        peak = tl.max(value, 1)
        there = row.to(tl.int64) * tl.num_programs(0) + tile
        tl.store(most + there, peak, mask=row < rows)
        place = tl.min(tl.where(value == peak[:, None], column[None, :], features), 1)
        tl.store(which + there, place, mask=row < rows)
        # A piece in which nothing is possible must not make its sum undefined.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(sums + there, tl.sum(tl.exp(value - shift[:, None]), 1), mask=row < rows)

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def weighing_kernel(  # type: ignore[no-untyped-def]
        x,
        squares,
        weight,
        out,
        most,
        sums,
        weights,
        rows,
        width,
        features,
        words,
        pieces,
        eps,
        scale,
        is_normed: tl.constexpr,
        is_scaled: tl.constexpr,
        piece: tl.constexpr,
        bits: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
    ):
        """One program for a tile of logits, which it writes, and of which it leaves what `draw` has to know.

        `words` is how many pieces of `piece` words there are.
        """
        row, column = tl.arange(0, block_m), tl.program_id(0) * block_n + tl.arange(0, block_n)
        value = _logits(
            x,
            squares,
            weight,
            row,
            column,
            rows,
            width,
            features,
            pieces,
            eps,
            is_normed,
            block_m,
            block_n,
            block_k,
            chained,
        )
        inside = (row < rows)[:, None] & (column < features)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * features + column[None, :], value, mask=inside)
        each: tl.constexpr = block_n // piece
        peak, total, heavy = weigh(tl.reshape(value, (block_m * each, piece)).to(tl.float32), scale, bits, is_scaled)
        number = tl.arange(0, block_m * each)
        its_row, own = number // each, tl.program_id(0) * each + number % each
        inside, there = (its_row < rows) & (own < words), its_row.to(tl.int64) * words + own
        tl.store(most + there, peak, mask=inside)
        tl.store(sums + there, total, mask=inside)
        tl.store(weights + there, heavy, mask=inside)

    @triton.jit(do_not_specialize=NO_KEYS)  # type: ignore[untyped-decorator,misc,unused-ignore]
    def lookup_kernel(  # type: ignore[no-untyped-def]
        tokens,
        embedding,
        gain,
        out,
        gained,
        squares,
        lengths,
        last,
        places,
        width,
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
        block: tl.constexpr,
        places_too: tl.constexpr,
        chained: tl.constexpr,
        looks: tl.constexpr,
    ):
        """One program a row: its place, and the vector of its token there."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
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
                tl.program_id(0),
                tl.num_programs(0),
            )
        inside = at < width
        factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        if chained:
            follow()
        if places_too:
            length = tl.load(lengths + row)
            tl.store(places + row, tl.minimum(length, tl.load(last + row)))
            tl.store(lengths + row, length + 1)
        value = tl.load(embedding + tl.load(tokens + row) * width + at, mask=inside, other=0.0)
        tl.store(out + row * width + at, value, mask=inside)
        wide = value.to(tl.float32)
        tl.store(gained + row * width + at, (wide * factor).to(value.dtype), mask=inside)
        tl.store(squares + row, tl.sum(wide * wide, 0))


class At(NamedTuple):
    """Where rows stand (rows), in whole numbers of one kind."""

    lengths: Tensor
    last: Tensor
    """The last place that each row has."""
    places: Tensor
    """Where the next token of each belongs."""

    def advance(self) -> None:
        """Find the places, and count the tokens that go there."""
        torch.minimum(self.lengths, self.last, out=self.places)
        self.lengths.add_(1)


def look_up(
    tokens: Tensor, embedding: Tensor, norm: Norm, *, at: At | None = None, ahead: Ahead | None = None
) -> ResidualStream:
    """The rows of an embedding that the tokens name; rows of a cache, where given, advance by one."""
    if not suits(embedding, embedding) or len(tokens) > MOST_ROWS:
        if at is not None:
            at.advance()
        return ResidualStream(F.embedding(tokens, embedding), norm)
    rows, width = len(tokens), embedding.shape[1]
    x, gained = (embedding.new_empty(rows, width) for _ in range(2))
    squares = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        lookup_kernel[(rows,)](
            tokens,
            embedding,
            norm.weight,
            x,
            gained,
            squares,
            *((tokens, tokens, tokens) if at is None else at),
            width,
            **ahead_options(x, ahead),
            block=power_of(width),
            places_too=at is not None,
            num_warps=8,
            **dependent_launch_options(is_chained(x)),
        )
    return ResidualStream(x, norm, gained, squares)


def likeliest(stream: ResidualStream, head: Tensor, counters: Tensor, *, table: Table = TILES) -> tuple[Tensor, Tensor]:
    """`greedy` of the norm of the stream times a weight (vocabulary, width); kernels write no logits."""
    tiles = tiles_for("wide", stream.x, [head], table)
    if tiles is None or len(head) < WIDE:
        return greedy(project(stream, [head], counters, table=table))
    x, squares = stream.readable()
    (rows, width), count = x.shape, -(-len(head) // tiles.n)
    pieces = Pieces.empty(rows, count, len(head), x.device)
    with on_device_of(x):
        likeliest_kernel[(count,)](
            x,
            x if squares is None else squares,
            head,
            *pieces[:3],
            rows,
            width,
            len(head),
            0 if squares is None else len(squares),
            stream.norm.eps,
            is_normed=squares is not None,
            **launch_options(tiles, x),
        )
    return pieces.likeliest(chained=is_chained(x))


def drawn(
    stream: ResidualStream,
    head: Tensor,
    temperature: float,
    chance: CounterRNG,
    counters: Tensor,
    *,
    table: Table = TILES,
) -> tuple[Tensor, Tensor]:
    """`draw` of the norm of the stream times a weight (vocabulary, width); who multiplies leaves the sums too."""
    tiles = tiles_for("wide", stream.x, [head], table)
    # In fp32, whose logits are not rounded, a compiler would join the norm to what is done with them here.
    short = len(head) >= WIDE and stream.x.itemsize == 2 and can_weigh(len(head), chance)
    if tiles is None or not short or tiles.n % PIECE:
        return draw(project(stream, [head], counters, table=table), temperature, chance)
    x, squares = stream.readable()
    (rows, width), logits = x.shape, x.new_empty(len(x), len(head))
    weighed = Weighed.empty(rows, len(head), x.device)
    with on_device_of(x):
        weighing_kernel[(-(-len(head) // tiles.n),)](
            x,
            x if squares is None else squares,
            head,
            logits,
            *weighed,
            rows,
            width,
            len(head),
            pieces_of(len(head)),
            0 if squares is None else len(squares),
            stream.norm.eps,
            scale_at(temperature),
            is_normed=squares is not None,
            is_scaled=temperature != 1.0,
            piece=PIECE,
            bits=WORD_BITS,
            **launch_options(tiles, x),
        )
    return weighed.draw(logits, temperature, chance, chained=is_chained(x))
