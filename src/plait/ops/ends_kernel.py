"""The Triton forms of `ends`."""

from __future__ import annotations

from plait.ops.triton import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.ops.chain import NO_KEYS, ask_for, follow, look_ahead
    from plait.ops.draw import weigh
    from plait.ops.skinny_kernel import product_of, scale_of, squares_of

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
        total = product_of(x, weight, row, safe, 0, tl.cdiv(width, block_k), rows, width, block_m, block_n, block_k)
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
            look_ahead(
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
