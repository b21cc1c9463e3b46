"""The Triton forms of `skinny`: few rows times large weights, each weight read once.

[Note: the last one adds up] Where there are too few tiles to keep the device busy, several programs share one, each
along a part of the summed dim. Each leaves its sums in `partial` and counts itself. Who counts last adds up what all
have left, always in the same order, and sets the count back to zero for the next launch.

[Note: early loads] What is needed behind the product is loaded before it, so that nobody waits for it at the end. The
stream that a product is added to is older than what is multiplied, so at least two kernels old: it is loaded before the
wait of [Note: chained kernels].
"""

from __future__ import annotations

from plait.ops.triton import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.ops.chain import NO_KEYS, ask_for, follow, look_ahead

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _rows(x, row, at, rows, width):  # type: ignore[no-untyped-def]
        """A piece of the input (rows, width)."""
        inside = (row < rows)[:, None] & (at < width)[None, :]
        return tl.load(x + row.to(tl.int64)[:, None] * width + at[None, :], mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _piece(weight, column, at, width):  # type: ignore[no-untyped-def]
        """A piece of a weight (features, width), which nobody reads a second time."""
        here = weight + column.to(tl.int64)[:, None] * width + at[None, :]
        return tl.load(here, mask=(at < width)[None, :], other=0.0, eviction_policy="evict_first")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def squares_of(squares, begin, pieces, row, rows, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
        """Some of the sums of squares (pieces, rows)."""
        at_once: tl.constexpr = 2048 // block_m if block_m <= 32 else 4096 // block_m
        piece = begin + tl.arange(0, at_once)
        inside = (piece < pieces)[:, None] & (row < rows)[None, :]
        return tl.load(squares + piece[:, None] * rows + row[None, :], mask=inside, other=0.0)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def scale_of(begun, squares, pieces, row, rows, width, eps, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
        """What an RMSNorm multiplies each row with, from sums of squares of which the first are there."""
        total = tl.sum(begun, 0)
        for begin in range(begun.shape[0], pieces, begun.shape[0]):
            total += tl.sum(squares_of(squares, begin, pieces, row, rows, block_m), 0)
        return 1.0 / tl.sqrt(total / width + eps)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _beside(residual, gain, here, column, inside):  # type: ignore[no-untyped-def]
        """What a product is added to, and the gain of the norm behind it."""
        own = tl.load(residual + here, mask=inside, other=0.0, cache_modifier=".cg")
        return own.to(tl.float32), tl.load(gain + column).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def product_of(  # type: ignore[no-untyped-def]
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
        """Rows times columns of a weight, added up along some steps of the width."""
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        for step in range(first, last):
            at = step * block_k + tl.arange(0, block_k)
            value, piece = _rows(x, row, at, rows, width), _piece(weight, column, at, width)
            total = tl.dot(value, tl.trans(piece), total, input_precision="ieee")
        return total

    @triton.jit(do_not_specialize=["rows", "pieces", *NO_KEYS])  # type: ignore[untyped-decorator,misc,unused-ignore]
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
        is_normed: tl.constexpr,
        adds: tl.constexpr,
        split: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
        early: tl.constexpr,
        looks: tl.constexpr,
    ):
        """One program for a tile of one of up to three weights, and a part of the summed dim."""
        tile, part = tl.program_id(0), tl.program_id(1)
        weight, features, begin, own = first, n_first, 0, tile
        if own >= tl.cdiv(n_first, block_n):
            own -= tl.cdiv(n_first, block_n)
            weight, features, begin = second, n_second, n_first
            if own >= tl.cdiv(n_second, block_n):
                own -= tl.cdiv(n_second, block_n)
                weight, features, begin = third, n_third, n_first + n_second
        weight = tl.multiple_of(weight, 16)
        row, column = tl.arange(0, block_m), own * block_n + tl.arange(0, block_n)
        safe = tl.minimum(column, features - 1)
        here = row.to(tl.int64)[:, None] * (n_first + n_second + n_third) + (begin + column)[None, :]
        inside = (row < rows)[:, None] & (column < features)[None, :]
        steps = tl.cdiv(tl.cdiv(width, block_k), split)
        if adds and early:  # see [Note: early loads]
            beside, factor = _beside(residual, gain, here, safe, inside)
        if chained:  # see [Note: chained kernels]
            ask_for(weight, safe, part * steps * block_k, tl.minimum((part + 1) * steps * block_k, width), width, 16)
            follow()
        if is_normed and early:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
        total = product_of(
            x, weight, row, safe, part * steps, (part + 1) * steps, rows, width, block_m, block_n, block_k
        )
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
                tile + part * tl.num_programs(0),
                tl.num_programs(0) * split,
            )
        last = True
        if split > 1:  # see [Note: the last one adds up]
            size: tl.constexpr = block_m * block_n
            place = row[:, None] * block_n + tl.arange(0, block_n)[None, :]
            tl.store(partial + (tile * split + part).to(tl.int64) * size + place, total)
            tl.debug_barrier()
            last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
            if last:
                total = tl.zeros((block_m, block_n), dtype=tl.float32)
                theirs = partial + (tile * split).to(tl.int64) * size + place
                for each in tl.static_range(split):
                    total += tl.load(theirs + each * size, cache_modifier=".cg")
                tl.store(counters + tile, 0)
        if last:
            if is_normed:
                if not early:
                    begun = squares_of(squares, 0, pieces, row, rows, block_m)
                total *= scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
            kind = out.dtype.element_ty
            if adds:
                if not early:
                    beside, factor = _beside(residual, gain, here, safe, inside)
                # Rounded before it is added, as a layer would leave it, and after, as it goes on.
                total = (total.to(kind).to(tl.float32) + beside).to(kind).to(tl.float32)
                tl.store(gained + here, (total * factor[None, :]).to(kind), mask=inside)
                squared = tl.sum(tl.where(inside, total * total, 0.0), 1)
                tl.store(new_squares + tile * rows + row, squared, mask=row < rows)
            tl.store(out + here, total.to(kind), mask=inside)

    @triton.jit(do_not_specialize=["rows", "pieces", *NO_KEYS])  # type: ignore[untyped-decorator,misc,unused-ignore]
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
        is_normed: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
        early: tl.constexpr,
        looks: tl.constexpr,
    ):
        """One program for the same tile of two weights."""
        row, k = tl.arange(0, block_m), tl.arange(0, block_k)
        column = tl.program_id(0) * block_n + tl.arange(0, block_n)
        safe = tl.minimum(column, features - 1)
        g = tl.zeros((block_m, block_n), dtype=tl.float32)
        u = tl.zeros((block_m, block_n), dtype=tl.float32)
        if chained:  # see [Note: chained kernels]
            ask_for(gate, safe, 0, width, width, 16)
            ask_for(up, safe, 0, width, width, 16)
            follow()
        if is_normed and early:
            begun = squares_of(squares, 0, pieces, row, rows, block_m)
        for step in range(tl.cdiv(width, block_k)):
            at = step * block_k + k
            value = _rows(x, row, at, rows, width)
            g = tl.dot(value, tl.trans(_piece(gate, safe, at, width)), g, input_precision="ieee")
            u = tl.dot(value, tl.trans(_piece(up, safe, at, width)), u, input_precision="ieee")
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
        if is_normed:
            if not early:
                begun = squares_of(squares, 0, pieces, row, rows, block_m)
            scale = scale_of(begun, squares, pieces, row, rows, width, eps, block_m)[:, None]
            g, u = g * scale, u * scale
        here = row.to(tl.int64)[:, None] * features + column[None, :]
        inside = (row < rows)[:, None] & (column < features)[None, :]
        tl.store(out + here, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)
