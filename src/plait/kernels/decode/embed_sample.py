"""The first and the last kernels of a decode step: embedding look-up, and the head together with sampling.

The first also updates the rows' positions; the last also computes the maxima and sums that sampling needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels import HAS_TRITON, on_device_of
from plait.kernels.decode.dependent_launch import (
    Prefetch,
    dependent_launch_options,
    prefetch_options,
    uses_dependent_launch,
)
from plait.kernels.decode.sampling import (
    PIECE,
    WORD_BITS,
    CounterRNG,
    GreedyPieces,
    SamplingPieces,
    can_sample,
    greedy,
    pieces_of,
    sample_tokens,
    scale_at,
)
from plait.kernels.decode.skinny_gemm import (
    CONFIGS,
    MOST_ROWS,
    WIDE,
    ConfigTable,
    Norm,
    ResidualStream,
    config_for,
    launch_options,
    next_power_of_two,
    project,
    supports,
)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import (
        PREFETCH_ARGUMENTS,
        prefetch_next,
        prefetch_rows,
        wait_for_previous,
    )
    from plait.kernels.decode.sampling import weigh
    from plait.kernels.decode.skinny_gemm import scale_of, skinny_product_of, squares_of

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _logits_tile(  # type: ignore[no-untyped-def]
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
        dependent: tl.constexpr,
    ):
        """Return a tile of logits, rounded to the dtype of stored logits, so that all kernels choose alike."""
        safe = tl.minimum(column, features - 1)
        if dependent:  # see [Note: programmatic dependent launch]
            prefetch_rows(weight, safe, 0, width, width, 16)
            wait_for_previous()
        total = skinny_product_of(
            x, weight, row, safe, 0, tl.cdiv(width, block_k), rows, width, block_m, block_n, block_k
        )
        if is_normed:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
            total *= scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
        value = total.to(x.dtype.element_ty)
        return tl.where((column < features)[None, :], value, float("-inf"))

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def greedy_head_kernel(  # type: ignore[no-untyped-def]
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
        dependent: tl.constexpr,
    ):
        """Compute one tile of logits per program, and store its values for `GreedyPieces` instead of the logits."""
        tile = tl.program_id(0)
        row, column = tl.arange(0, block_m), tile * block_n + tl.arange(0, block_n)
        value = _logits_tile(
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
            dependent,
        ).to(tl.float32)
        peak = tl.max(value, 1)
        there = row.to(tl.int64) * tl.num_programs(0) + tile
        tl.store(most + there, peak, mask=row < rows)
        index = tl.min(tl.where(value == peak[:, None], column[None, :], features), 1)
        tl.store(which + there, index, mask=row < rows)
        # A piece of which all logits are -inf must not make its sum NaN.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(sums + there, tl.sum(tl.exp(value - shift[:, None]), 1), mask=row < rows)

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def sample_head_kernel(  # type: ignore[no-untyped-def]
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
        piece_count,
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
        dependent: tl.constexpr,
    ):
        """Compute and store one tile of logits per program, and its values for `SamplingPieces`."""
        row, column = tl.arange(0, block_m), tl.program_id(0) * block_n + tl.arange(0, block_n)
        value = _logits_tile(
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
            dependent,
        )
        inside = (row < rows)[:, None] & (column < features)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * features + column[None, :], value, mask=inside)
        pieces_per_tile: tl.constexpr = block_n // piece
        peak, total, heavy = weigh(
            tl.reshape(value, (block_m * pieces_per_tile, piece)).to(tl.float32), scale, bits, is_scaled
        )
        number = tl.arange(0, block_m * pieces_per_tile)
        its_row, piece_index = number // pieces_per_tile, tl.program_id(0) * pieces_per_tile + number % pieces_per_tile
        inside, there = (its_row < rows) & (piece_index < piece_count), its_row.to(tl.int64) * piece_count + piece_index
        tl.store(most + there, peak, mask=inside)
        tl.store(sums + there, total, mask=inside)
        tl.store(weights + there, heavy, mask=inside)

    @triton.jit(do_not_specialize=PREFETCH_ARGUMENTS)  # type: ignore[untyped-decorator,misc,unused-ignore]
    def embed_kernel(  # type: ignore[no-untyped-def]
        tokens,
        embedding,
        gain,
        out,
        gained,
        squares,
        lengths,
        last,
        positions,
        width,
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
        block: tl.constexpr,
        advances: tl.constexpr,
        dependent: tl.constexpr,
        prefetches: tl.constexpr,
    ):
        """Advance the position of one row per program, and store the embedding of its token."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
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
        inside = at < width
        factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        if dependent:
            wait_for_previous()
        if advances:
            length = tl.load(lengths + row)
            tl.store(positions + row, tl.minimum(length, tl.load(last + row)))
            tl.store(lengths + row, length + 1)
        value = tl.load(embedding + tl.load(tokens + row) * width + at, mask=inside, other=0.0)
        tl.store(out + row * width + at, value, mask=inside)
        wide = value.to(tl.float32)
        tl.store(gained + row * width + at, (wide * factor).to(value.dtype), mask=inside)
        tl.store(squares + row, tl.sum(wide * wide, 0))


class RowPositions(NamedTuple):
    """The lengths and positions of the rows, (rows) each, of one integer dtype."""

    lengths: Tensor
    last: Tensor
    """The last position of each row."""
    positions: Tensor
    """The position of each row's next token."""

    def advance(self) -> None:
        """Compute the positions of the next tokens, and add these to the lengths."""
        torch.minimum(self.lengths, self.last, out=self.positions)
        self.lengths.add_(1)


def embed(
    tokens: Tensor, embedding: Tensor, norm: Norm, *, at: RowPositions | None = None, prefetch: Prefetch | None = None
) -> ResidualStream:
    """Return the residual stream at the start of a step, the tokens' embeddings; advance `at`, if given."""
    if not supports(embedding, embedding) or len(tokens) > MOST_ROWS:
        if at is not None:
            at.advance()
        return ResidualStream(F.embedding(tokens, embedding), norm)
    rows, width = len(tokens), embedding.shape[1]
    x, gained = (embedding.new_empty(rows, width) for _ in range(2))
    squares = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        embed_kernel[(rows,)](
            tokens,
            embedding,
            norm.weight,
            x,
            gained,
            squares,
            *((tokens, tokens, tokens) if at is None else at),
            width,
            **prefetch_options(x, prefetch),
            block=next_power_of_two(width),
            advances=at is not None,
            num_warps=8,
            **dependent_launch_options(uses_dependent_launch(x)),
        )
    return ResidualStream(x, norm, gained, squares)


def greedy_head(
    stream: ResidualStream, head: Tensor, counters: Tensor, *, table: ConfigTable = CONFIGS
) -> tuple[Tensor, Tensor]:
    """Return `greedy` of the logits `stream.normed() @ head.T`, for a head (vocabulary, width), not storing them."""
    config = config_for("wide", stream.x, [head], table)
    if config is None or len(head) < WIDE:
        return greedy(project(stream, [head], counters, table=table))
    x, squares = stream.readable()
    (rows, width), count = x.shape, -(-len(head) // config.n)
    pieces = GreedyPieces.empty(rows, count, len(head), x.device)
    with on_device_of(x):
        greedy_head_kernel[(count,)](
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
            **launch_options(config, x),
        )
    return pieces.greedy(dependent=uses_dependent_launch(x))


def sample_head(
    stream: ResidualStream,
    head: Tensor,
    temperature: float,
    rng: CounterRNG,
    counters: Tensor,
    *,
    table: ConfigTable = CONFIGS,
) -> tuple[Tensor, Tensor]:
    """Return `sample_tokens` of the logits `stream.normed() @ head.T`, whose kernel also sums up the pieces."""
    config = config_for("wide", stream.x, [head], table)
    # Not in fp32, where logits are not rounded: the compiler would fuse the multiplication by the norm's factor with
    # the operations after it, and results would differ.
    one_pass = len(head) >= WIDE and stream.x.itemsize == 2 and can_sample(len(head), rng)
    if config is None or not one_pass or config.n % PIECE:
        return sample_tokens(project(stream, [head], counters, table=table), temperature, rng)
    x, squares = stream.readable()
    (rows, width), logits = x.shape, x.new_empty(len(x), len(head))
    weighed = SamplingPieces.empty(rows, len(head), x.device)
    with on_device_of(x):
        sample_head_kernel[(-(-len(head) // config.n),)](
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
            **launch_options(config, x),
        )
    return weighed.sample(logits, temperature, rng, dependent=uses_dependent_launch(x))
