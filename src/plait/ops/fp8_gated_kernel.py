"""The Triton forms of `fp8_gated`: what lies between the products of a gated feed-forward is never written in 16 bits.

It is computed twice, once for its largest number and once for its copies in 8 bits; once only with a scale of earlier
steps. Each time only its inputs are read, and all else stays on the chip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.ops.fp8_kernel import PEAKS, READ, programs_for, room_for
from plait.ops.triton import HAS_TRITON, interprets, on_device_of

_TALL, _WIDE = 64, 64
"""Rows and columns of a tile."""
_READ = READ // 2
"""Of two or three tensors at a time."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.ops.fp8_kernel import fitted, note, pair, scale_from, size_bits, turn

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _as_stored(value, like):  # type: ignore[no-untyped-def]
        """The number that would be read, had it been written."""
        return value.to(like.dtype.element_ty).to(tl.float32)

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
                largest = tl.maximum(largest, size_bits(_as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)))
                largest = tl.maximum(largest, size_bits(_as_stored(d * g * s, gate)))
            else:
                largest = tl.maximum(largest, size_bits(_as_stored(g * s * u, gate)))
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
        note(size_bits(product), notes, note_count)

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
        by_hand: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """One program a tile: the product turned over, and the gradients of both sides, side by side, both ways.

        See [Note: turned over in words] in `fp8_kernel`. `note_count`: so many notes for each of these gradients.
        """
        across = tl.cdiv(width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter)[:, None], left + tl.arange(0, wide)[None, :]
        gate, up, grad = gate + top * width, up + top * width, grad + top * width
        rows, below = rows + top * (2 * width), height - top
        product_scale = scale_from(
            product_peaks, product_peak_count, smallest, product_limit, product_inverse, peak_block
        )
        scale = scale_from(peaks, peak_count, smallest, limit, inverse, peak_block)
        nothing = tl.zeros((quarter, wide), dtype=tl.int32)
        seen_gate, seen_up = nothing, nothing
        product_word, gate_word, up_word = nothing, nothing, nothing
        for part in tl.static_range(4):
            at = down + part
            inside = (at < below) & (right < width)
            here = at * width + right
            g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            product = fitted(_as_stored(g * s * u, gate), product_scale, product_limit, saturates)
            slope = _as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)
            seen_gate = tl.maximum(seen_gate, size_bits(slope))
            of_gate = fitted(slope, scale, limit, saturates)
            slope = _as_stored(d * g * s, gate)
            seen_up = tl.maximum(seen_up, size_bits(slope))
            of_up = fitted(slope, scale, limit, saturates)
            if has_rows:
                beside = rows + at * (2 * width) + right
                tl.store(beside, of_gate.to(rows.dtype.element_ty), mask=inside)
                tl.store(beside + width, of_up.to(rows.dtype.element_ty), mask=inside)
            if part % 2 == 0:
                product_before, gate_before, up_before = product, of_gate, of_up
            else:
                product_word |= pair(product_before, product, product_columns, by_hand) << (8 * (part - 1))
                gate_word |= pair(gate_before, of_gate, columns, by_hand) << (8 * (part - 1))
                up_word |= pair(up_before, of_up, columns, by_hand) << (8 * (part - 1))
        note(seen_gate, notes, note_count)
        note(seen_up, notes + note_count, note_count)
        turn(product_word, product_columns, padded, top, left, padded, width, quarter, wide)
        turn(gate_word, columns, padded, top, left, padded, width, quarter, wide)
        turn(up_word, columns + padded.to(tl.int64) * width, padded, top, left, padded, width, quarter, wide)


def _gate_peaks_fake(gate: Tensor, up: Tensor, grad: Tensor | None) -> Tensor:
    return torch.stack([x.amax() for x in (gate, up, grad) if x is not None])[0].float().repeat(PEAKS)


@on_fake_tensors(_gate_peaks_fake)
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


def _product_fake(
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
    rows.copy_(gate)
    up.amax()


@on_fake_tensors(_product_fake)
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


def _slopes_fake(
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
    height, width = gate.shape
    for room, x in ((product, gate), (columns[:width], up), (columns[width:], grad)):
        room[:, :height].copy_(x.t())
    if rows is not None:
        rows.copy_(columns[:, :height].t())


@on_fake_tensors(_slopes_fake)
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
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )


def _programs(height: int, width: int) -> int:
    return int(triton.cdiv(height, _TALL) * triton.cdiv(width, _WIDE))
