"""The Triton forms of `skinny`: few rows times large weights, each weight read once.

[Note: the last one adds up] Where there are too few tiles to keep the device busy, several programs share one, each
along a part of the summed dim. Each leaves its sums in `partial` and counts itself. Who counts last adds up what all
have left, always in the same order, and sets the count back to zero for the next launch.
"""

from __future__ import annotations

from plait.ops.triton import HAS_TRITON

if HAS_TRITON:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    from plait.ops.chain import ask_for, follow

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
    def _scale(squares, pieces, row, rows, width, eps, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
        """What an RMSNorm multiplies each row with, from sums of squares (pieces, rows)."""
        at_once: tl.constexpr = 4096 // block_m
        total = tl.zeros((block_m,), dtype=tl.float32)
        for begin in range(0, pieces, at_once):
            piece = begin + tl.arange(0, at_once)
            inside = (piece < pieces)[:, None] & (row < rows)[None, :]
            total += tl.sum(tl.load(squares + piece[:, None] * rows + row[None, :], mask=inside, other=0.0), 0)
        return 1.0 / tl.sqrt(total / width + eps)

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
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
        is_normed: tl.constexpr,
        adds: tl.constexpr,
        split: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
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
        row, column, k = tl.arange(0, block_m), own * block_n + tl.arange(0, block_n), tl.arange(0, block_k)
        safe = tl.minimum(column, features - 1)
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        steps = tl.cdiv(tl.cdiv(width, block_k), split)
        if chained:  # see [Note: chained kernels]
            ask_for(weight, safe, part * steps * block_k, tl.minimum((part + 1) * steps * block_k, width), width, 16)
            follow()
        for step in range(part * steps, (part + 1) * steps):
            at = step * block_k + k
            value, piece = _rows(x, row, at, rows, width), _piece(weight, safe, at, width)
            total = tl.dot(value, tl.trans(piece), total, input_precision="ieee")
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
                total *= _scale(squares, pieces, row, rows, width, eps, block_m)[:, None]
            here = row.to(tl.int64)[:, None] * (n_first + n_second + n_third) + (begin + column)[None, :]
            inside = (row < rows)[:, None] & (column < features)[None, :]
            kind = out.dtype.element_ty
            if adds:
                # Rounded before it is added, as a layer would leave it, and after, as it goes on.
                total = total.to(kind).to(tl.float32) + tl.load(residual + here, mask=inside, other=0.0).to(tl.float32)
                total = total.to(kind).to(tl.float32)
                factor = tl.load(gain + safe).to(tl.float32)
                tl.store(gained + here, (total * factor[None, :]).to(kind), mask=inside)
                squared = tl.sum(tl.where(inside, total * total, 0.0), 1)
                tl.store(new_squares + tile * rows + row, squared, mask=row < rows)
            tl.store(out + here, total.to(kind), mask=inside)

    @triton.jit(do_not_specialize=["rows", "pieces"])  # type: ignore[untyped-decorator,misc,unused-ignore]
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
        is_normed: tl.constexpr,
        block_m: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        chained: tl.constexpr,
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
        for step in range(tl.cdiv(width, block_k)):
            at = step * block_k + k
            value = _rows(x, row, at, rows, width)
            g = tl.dot(value, tl.trans(_piece(gate, safe, at, width)), g, input_precision="ieee")
            u = tl.dot(value, tl.trans(_piece(up, safe, at, width)), u, input_precision="ieee")
        if is_normed:
            scale = _scale(squares, pieces, row, rows, width, eps, block_m)[:, None]
            g, u = g * scale, u * scale
        here = row.to(tl.int64)[:, None] * features + column[None, :]
        inside = (row < rows)[:, None] & (column < features)[None, :]
        tl.store(out + here, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def lookup_kernel(  # type: ignore[no-untyped-def]
        tokens, embedding, gain, out, gained, squares, width, block: tl.constexpr
    ):
        """One program a row."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < width
        value = tl.load(embedding + tl.load(tokens + row) * width + at, mask=inside, other=0.0)
        tl.store(out + row * width + at, value, mask=inside)
        wide = value.to(tl.float32)
        factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(gained + row * width + at, (wide * factor).to(value.dtype), mask=inside)
        tl.store(squares + row, tl.sum(wide * wide, 0))
