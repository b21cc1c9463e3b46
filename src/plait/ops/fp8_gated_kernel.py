"""The Triton forms of `fp8_gated`: what lies between the products of a gated feed-forward is never written in 16 bits.

It is computed twice, once for its largest number and once for its copies in 8 bits; once only with a scale of earlier
steps. Each time only its inputs are read, and all else stays on the chip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.fp8_kernel import READ, programs_for, room_for
from plait.ops.triton import HAS_TRITON, on_device_of

_TALL, _WIDE = 64, 64
"""Rows and columns of a tile."""
_READ = READ // 2
"""Of two or three tensors at a time."""

if HAS_TRITON:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    from plait.ops.fp8_kernel import fitted, note, scale_from

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _as_stored(value, like):  # type: ignore[no-untyped-def]
        """The number that would be read, had it been written."""
        return value.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _bits(value):  # type: ignore[no-untyped-def]
        """Of absolute values, whose order they share; what is not a number comes last."""
        return tl.abs(value).to(tl.int32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _gate_peak_kernel(gate, up, grad, peaks, count, slopes: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """The largest absolute value of the product or, with `slopes`, of the gradients of both sides."""
        program = tl.program_id(0)
        blocks = tl.cdiv(count, block)
        at = tl.arange(0, block)
        largest = tl.zeros((block,), dtype=tl.int32)
        for index in range(program, blocks, tl.num_programs(0)):
            here = (blocks - 1 - index).to(tl.int64) * block + at
            inside = here < count
            g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            if slopes:
                d = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, _bits(_as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)))
                largest = tl.maximum(largest, _bits(_as_stored(d * g * s, gate)))
            else:
                largest = tl.maximum(largest, _bits(_as_stored(g * s * u, gate)))
        tl.store(peaks + program, tl.max(largest, 0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _product_kernel(  # type: ignore[no-untyped-def]
        gate,
        up,
        peaks,
        peak_count,
        rows,
        inverse,
        notes,
        height,
        width,
        smallest,
        limit,
        note_count: tl.constexpr,
        saturates: tl.constexpr,
        peak_block: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """One program a tile of the product, written as it lies."""
        across = tl.cdiv(width, wide)
        down = (tl.program_id(0) // across).to(tl.int64) * tall + tl.arange(0, tall)
        right = (tl.program_id(0) % across).to(tl.int64) * wide + tl.arange(0, wide)
        inside = (down < height)[:, None] & (right < width)[None, :]
        here = down[:, None] * width + right[None, :]
        g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
        scale = scale_from(peaks, peak_count, smallest, limit, inverse, peak_block)
        product = _as_stored(g * tl.sigmoid(g) * u, gate)
        tl.store(rows + here, fitted(product, scale, limit, saturates).to(rows.dtype.element_ty), mask=inside)
        note(product, notes, note_count)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _slopes_kernel(  # type: ignore[no-untyped-def]
        gate,
        up,
        grad,
        product_peaks,
        product_peak_count,
        peaks,
        peak_count,
        product_columns,
        rows,
        columns,
        product_inverse,
        inverse,
        notes,
        height,
        width,
        padded,
        smallest,
        product_limit,
        limit,
        has_rows: tl.constexpr,
        note_count: tl.constexpr,
        saturates: tl.constexpr,
        peak_block: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """One program a tile: the product turned over, and the gradients of both sides, side by side, both ways.

        `note_count`: so many notes for each of these gradients.
        """
        across = tl.cdiv(width, wide)
        down = (tl.program_id(0) // across).to(tl.int64) * tall + tl.arange(0, tall)
        right = (tl.program_id(0) % across).to(tl.int64) * wide + tl.arange(0, wide)
        inside = (down < height)[:, None] & (right < width)[None, :]
        room = (right < width)[:, None] & (down < padded)[None, :]
        here = down[:, None] * width + right[None, :]
        turned = right[:, None] * padded + down[None, :]
        g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        scale = scale_from(product_peaks, product_peak_count, smallest, product_limit, product_inverse, peak_block)
        product = fitted(_as_stored(g * s * u, gate), scale, product_limit, saturates)
        tl.store(product_columns + turned, tl.trans(product.to(product_columns.dtype.element_ty)), mask=room)
        scale = scale_from(peaks, peak_count, smallest, limit, inverse, peak_block)
        slope = _as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)
        note(slope, notes, note_count)
        of_gate = fitted(slope, scale, limit, saturates).to(columns.dtype.element_ty)
        slope = _as_stored(d * g * s, gate)
        note(slope, notes + note_count, note_count)
        of_up = fitted(slope, scale, limit, saturates).to(columns.dtype.element_ty)
        below = padded.to(tl.int64) * width
        tl.store(columns + turned, tl.trans(of_gate), mask=room)
        tl.store(columns + turned + below, tl.trans(of_up), mask=room)
        if has_rows:
            beside = down[:, None] * (2 * width) + right[None, :]
            tl.store(rows + beside, of_gate, mask=inside)
            tl.store(rows + beside + width, of_up, mask=inside)


def gate_peaks_triton(gate: Tensor, up: Tensor, grad: Tensor | None) -> Tensor:
    """Numbers the largest of which is that of the product or, with `grad`, of the gradients of both sides; fp32."""
    programs = programs_for(gate.numel(), _READ)
    peaks = torch.empty(programs, dtype=torch.float32, device=gate.device)
    with on_device_of(gate):
        _gate_peak_kernel[(programs,)](
            gate,
            up,
            gate if grad is None else grad,
            peaks,
            gate.numel(),
            slopes=grad is not None,
            block=_READ,
            num_warps=16,
        )
    return peaks


def product_triton(
    gate: Tensor,
    up: Tensor,
    peaks: Tensor,
    rows: Tensor,
    inverse: Tensor,
    smallest: float,
    *,
    notes: Tensor | None,
    saturates: bool,
) -> None:
    """Write the product of contiguous matrices in 8 bits into `rows`, and what it is to be multiplied by.

    `notes` and `saturates` are those of `fp8_cast.cast`.
    """
    height, width = gate.shape
    with on_device_of(gate):
        _product_kernel[(_programs(height, width),)](
            gate,
            up,
            peaks,
            len(peaks),
            rows,
            inverse,
            peaks if notes is None else notes,
            height,
            width,
            smallest,
            torch.finfo(rows.dtype).max,
            note_count=0 if notes is None else len(notes),
            saturates=saturates,
            peak_block=room_for(peaks),
            tall=_TALL,
            wide=_WIDE,
            num_warps=8,
        )


def slopes_triton(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    peaks: tuple[Tensor, Tensor],
    *,
    product: Tensor,
    rows: Tensor | None,
    columns: Tensor,
    inverses: tuple[Tensor, Tensor],
    smallest: float,
    notes: Tensor | None,
    saturates: bool,
) -> None:
    """Write the product, turned over, and the gradients of both sides, turned over and, with `rows`, as they lie.

    Pairs are for the product first, then for the gradients. What is turned over may be longer than `gate` is high: what
    is left is zero. `notes` are two, of the gradients.
    """
    height, width = gate.shape
    padded = product.shape[1]
    with on_device_of(gate):
        _slopes_kernel[(_programs(padded, width),)](
            gate,
            up,
            grad,
            peaks[0],
            len(peaks[0]),
            peaks[1],
            len(peaks[1]),
            product,
            columns if rows is None else rows,
            columns,
            *inverses,
            peaks[0] if notes is None else notes,
            height,
            width,
            padded,
            smallest,
            torch.finfo(product.dtype).max,
            torch.finfo(columns.dtype).max,
            has_rows=rows is not None,
            note_count=0 if notes is None else 1,
            saturates=saturates,
            peak_block=max(map(room_for, peaks)),
            tall=_TALL,
            wide=_WIDE,
            num_warps=8,
        )


def _programs(height: int, width: int) -> int:
    return int(triton.cdiv(height, _TALL) * triton.cdiv(width, _WIDE))
