"""The Triton forms of `fp8_cast`: a tensor is read once for its largest number, and once for both copies in 8 bits.

The second reading begins where the first one ended, in what the cache still holds. With a scale of earlier steps there
is one reading, which also notes the largest number; see [Note: scales of earlier steps] in `fp8_earlier`.

[Note: turned over in words] To be turned over, a tile goes through memory that all threads of a program share, and that
memory moves words of four bytes as fast as single bytes. So a program takes every fourth row of its tile at a time, and
what four such rows hold in one column, which lies side by side in the copy that is turned over, becomes one word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.ops.triton import HAS_TRITON, interprets, on_device_of

PEAKS = 256
"""At most so many programs look for a tensor's largest number; each leaves what it found. Two for a multiprocessor."""
FEW = 4
"""Layers that are computed together, at most; each has a peak from earlier steps."""
READ = 16384
"""Numbers that such a program reads at a time."""
_TALL, _WIDE = 128, 64
"""Rows and columns of a tile: what is read of it, and what is written turned over, are lines of the cache."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def size_bits(value):  # type: ignore[no-untyped-def]
        """The bits of absolute values: their order is that of the numbers, and what is not a number comes last."""
        return tl.abs(value).to(tl.int32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _peak_kernel(x, peaks, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """The largest absolute value of every so many blocks, from the last one to the first."""
        program = tl.program_id(0)
        blocks = tl.cdiv(count, block)
        at = tl.arange(0, block)
        largest = tl.zeros((block,), dtype=tl.int32)
        for index in range(program, blocks, tl.num_programs(0)):
            here = (blocks - 1 - index).to(tl.int64) * block + at
            value = tl.load(x + here, mask=here < count, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, size_bits(value))
        tl.store(peaks + program, tl.max(largest, 0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def scale_from(peaks, count, smallest, limit, inverse, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """The scale that goes with these peaks; the first program stores its inverse."""
        at = tl.arange(0, block)
        found = tl.load(peaks + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
        peak = tl.max(found, 0).to(tl.float32, bitcast=True)
        peak = tl.maximum(peak, smallest, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.math.div_rn(1.0, peak) * limit
        if tl.program_id(0) == 0:
            tl.store(inverse, tl.math.div_rn(1.0, scale))
        return scale

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def fitted(value, scale, limit, saturates: tl.constexpr):  # type: ignore[no-untyped-def]
        """The numbers as they are to be rounded; with `saturates` they may be larger than those the scale was made for.

        These are cut to the range. What is not finite must not be: it becomes NaN, which both formats have.
        """
        scaled = value * scale
        if saturates:
            cut = tl.minimum(tl.maximum(scaled, -limit), limit)
            scaled = tl.where(tl.abs(value) < float("inf"), cut, float("nan"))
        return scaled

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def note(bits, notes, count: tl.constexpr):  # type: ignore[no-untyped-def]
        """Raise so many notes to the largest of a tile, as `size_bits` has it."""
        if count > 0:
            largest = tl.max(tl.max(bits, 1), 0)
            for at in tl.static_range(count):
                tl.atomic_max(notes + at, largest, sem="relaxed")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def pair(first, second, like, by_hand: tl.constexpr):  # type: ignore[no-untyped-def]
        """Two numbers, in the format that `like` points to, in the lower half of a word, the first one lowest.

        `by_hand` is for the interpreter. On a device Triton 3.6 makes other bytes of these operations where the same
        numbers are stored, too.
        """
        kind: tl.constexpr = like.dtype.element_ty
        if by_hand:
            low = first.to(kind).to(tl.uint8, bitcast=True).to(tl.int32)
            both = low | (second.to(kind).to(tl.uint8, bitcast=True).to(tl.int32) << 8)
        elif kind == tl.float8e5:
            both = tl.inline_asm_elementwise(
                "{ .reg .b16 two; cvt.rn.satfinite.e5m2x2.f32 two, $2, $1; cvt.u32.u16 $0, two; }",
                "=r,f,f",
                [first, second],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            both = tl.inline_asm_elementwise(
                "{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, $2, $1; cvt.u32.u16 $0, two; }",
                "=r,f,f",
                [first, second],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        return both

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def turn(  # type: ignore[no-untyped-def]
        word, columns, stride, top, left, height, width, quarter: tl.constexpr, wide: tl.constexpr
    ):
        """Write a tile of words, turned over, where its numbers belong in `columns`, of a matrix (height, width)."""
        corner = (columns + left.to(tl.int64) * stride + top).to(tl.pointer_type(tl.int32))
        down, right = tl.arange(0, quarter)[None, :], tl.arange(0, wide)[:, None]
        room = (right < width - left) & (down < (height - top) // 4)
        tl.store(corner + right * (stride // 4) + down, tl.trans(word), mask=room)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _cast_kernel(  # type: ignore[no-untyped-def]
        x,
        peaks,
        peak_count,
        rows,
        columns,
        inverse,
        notes,
        height,
        width,
        padded,
        rows_stride,
        columns_stride,
        smallest,
        limit,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        note_count: tl.constexpr,
        saturates: tl.constexpr,
        peak_block: tl.constexpr,
        by_hand: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """One program a tile, which it writes as it lies, and turned over; see [Note: turned over in words]."""
        across = tl.cdiv(width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter)[:, None], left + tl.arange(0, wide)[None, :]
        x, rows, below = x + top * width, rows + top * rows_stride, height - top
        scale = scale_from(peaks, peak_count, smallest, limit, inverse, peak_block)
        seen = tl.zeros((quarter, wide), dtype=tl.int32)
        word = tl.zeros((quarter, wide), dtype=tl.int32)
        for part in tl.static_range(4):
            at = down + part
            inside = (at < below) & (right < width)
            value = tl.load(x + at * width + right, mask=inside, other=0.0).to(tl.float32)
            # By a scale of its own it is above the limit by its last bit at most, which rounding takes away.
            scaled = fitted(value, scale, limit, saturates)
            seen = tl.maximum(seen, size_bits(value))
            if has_rows:
                tl.store(rows + at * rows_stride + right, scaled.to(rows.dtype.element_ty), mask=inside)
            if part % 2 == 0:
                before = scaled
            else:
                word |= pair(before, scaled, columns, by_hand) << (8 * (part - 1))
        note(seen, notes, note_count)
        if has_columns:
            turn(word, columns, columns_stride, top, left, padded, width, quarter, wide)


def _peaks_fake(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.amax() for x in tensors]).float().repeat(PEAKS)


@on_fake_tensors(_peaks_fake)
def peaks_triton(tensors: Sequence[Tensor]) -> Tensor:
    """Numbers the largest of which is the largest absolute value in these contiguous tensors, fp32."""
    counts = [programs_for(x.numel(), READ) for x in tensors]
    peaks = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    with on_device_of(peaks):
        for x, count, found in zip(tensors, counts, peaks.split_with_sizes(counts), strict=True):
            _peak_kernel[(count,)](x, found, x.numel(), block=READ, num_warps=16)
    return peaks


def programs_for(numbers: int, block: int) -> int:
    """Programs that look for the largest of so many numbers, a block at a time."""
    return min(PEAKS, max(1, -(-numbers // block)))


def room_for(peaks: Tensor) -> int:
    """A power of two that peaks fit into: one for those of earlier steps, and one for tensors of all sizes.

    A kernel is compiled for each.
    """
    return FEW if len(peaks) <= FEW else int(max(PEAKS, triton.next_power_of_2(len(peaks))))


def _cast_fake(
    x: Tensor,
    peaks: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    inverse: Tensor,
    smallest: float,
    *,
    notes: Tensor | None,
    saturates: bool,
) -> None:
    if rows is not None:
        rows.copy_(x)
    if columns is not None:
        columns[:, : len(x)].copy_((x if rows is None else rows).t())


@on_fake_tensors(_cast_fake)
def cast_triton(
    x: Tensor,
    peaks: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    inverse: Tensor,
    smallest: float,
    *,
    notes: Tensor | None,
    saturates: bool,
) -> None:
    """Write a contiguous matrix in 8 bits into `rows` and, turned over, into `columns`.

    Both may be parts of larger ones. `columns` may be longer than `x` is high: what is left is zero. `inverse` is given
    what the numbers are to be multiplied by, and all `notes` are raised to the largest one.
    """
    height, width = x.shape
    room = rows if columns is None else columns
    assert room is not None
    padded = height if columns is None else columns.shape[1]
    programs = triton.cdiv(padded, _TALL) * triton.cdiv(width, _WIDE)
    with on_device_of(x):
        _cast_kernel[(programs,)](
            x,
            peaks,
            len(peaks),
            room if rows is None else rows,
            room,
            inverse,
            peaks if notes is None else notes,
            height,
            width,
            padded,
            room.stride(0) if rows is None else rows.stride(0),
            room.stride(0),
            smallest,
            torch.finfo(room.dtype).max,
            has_rows=rows is not None,
            has_columns=columns is not None,
            note_count=0 if notes is None else len(notes),
            saturates=saturates,
            peak_block=room_for(peaks),
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )
