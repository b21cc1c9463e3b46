"""The two ends of a token's way through a decoder: its vector in front of the first layer, and the choice of the next.

What stands beside them, where each row is and what the greatest logits are, takes no pass of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops import ends_kernel as kernels
from plait.ops.chain import Ahead, ahead_options, chain_options, is_chained
from plait.ops.chance import Chance
from plait.ops.draw import PIECE, WORD_BITS, Weighed, can_weigh, draw, pieces_of, scale_at
from plait.ops.greedy import Pieces, greedy
from plait.ops.skinny import (
    MOST_ROWS,
    TILES,
    WIDE,
    Norm,
    Stream,
    Table,
    launch_options,
    power_of,
    project,
    suits,
    tiles_for,
)
from plait.ops.triton import on_device_of


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
) -> Stream:
    """The rows of an embedding that the tokens name; rows of a cache, where given, advance by one."""
    if not suits(embedding, embedding) or len(tokens) > MOST_ROWS:
        if at is not None:
            at.advance()
        return Stream(F.embedding(tokens, embedding), norm)
    rows, width = len(tokens), embedding.shape[1]
    x, gained = (embedding.new_empty(rows, width) for _ in range(2))
    squares = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        kernels.lookup_kernel[(rows,)](
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
            **chain_options(is_chained(x)),
        )
    return Stream(x, norm, gained, squares)


def likeliest(stream: Stream, head: Tensor, counters: Tensor, *, table: Table = TILES) -> tuple[Tensor, Tensor]:
    """`greedy` of the norm of the stream times a weight (vocabulary, width); kernels write no logits."""
    tiles = tiles_for("wide", stream.x, [head], table)
    if tiles is None or len(head) < WIDE:
        return greedy(project(stream, [head], counters, table=table))
    x, squares = stream.readable()
    (rows, width), count = x.shape, -(-len(head) // tiles.n)
    pieces = Pieces.empty(rows, count, len(head), x.device)
    with on_device_of(x):
        kernels.likeliest_kernel[(count,)](
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
    stream: Stream, head: Tensor, temperature: float, chance: Chance, counters: Tensor, *, table: Table = TILES
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
        kernels.weighing_kernel[(-(-len(head) // tiles.n),)](
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
