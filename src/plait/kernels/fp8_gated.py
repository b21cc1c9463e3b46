"""A gated feed-forward in 8 bits, as one operation.

[Note: between the products] The product silu(gate) * up, and the gradients of both sides, are wanted in 8 bits only. So
they are not written in 16: they are computed once to find their scale, and once more to be rounded; once only where the
scale is known ([Note: scales of earlier steps] in `fp8_earlier`). Gate and up are what is kept; the product is made
again on the way back, in the reading that gives the gradients. The numbers are those of `fp8_linears`, `swiglu` and
`fp8_linear` in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.kernels.fp8 import (
    AT_ONCE,
    E4M3,
    E5M2,
    GRADIENT,
    INPUT,
    MULTIPLE,
    PEAKS,
    READ,
    SMALLEST,
    WEIGHT,
    Earlier,
    Fp8Matrix,
    cast,
    cast_plain,
    is_fused,
    peaks_plain,
    programs_for,
    room_for,
    scaled_product,
)
from plait.kernels.swiglu import slopes_plain
from plait.kernels.triton import HAS_TRITON, interprets, on_device_of

# The Triton forms of `fp8_gated`: what lies between the products of a gated feed-forward is never written in 16 bits.
#
# It is computed twice, once for its largest number and once for its copies in 8 bits; once only with a scale of earlier
# steps. Each time only its inputs are read, and all else stays on the chip.


_TALL, _WIDE = 64, 64
"""Rows and columns of a tile."""
_READ = READ // 2
"""Of two or three tensors at a time."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.fp8 import fitted, note, pair, scale_from, size_bits, turn

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


def fp8_feed_forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, emulated: bool, earlier: Earlier = AT_ONCE
) -> Tensor:
    """`down(silu(gate(x)) * up(x))` of layers without bias that all learn, or none does; one scale a tensor.

    `earlier` is what is known of the three layers.
    """
    keeps = torch.is_grad_enabled() and gate.requires_grad
    given = x.flatten(0, -2), keeps, emulated, earlier, gate, up, down
    thread, *factors = _Fp8GatedInner.apply(*given)  # type: ignore[no-untyped-call]
    flat: Tensor = _Fp8GatedLast.apply(thread, emulated, *factors)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], len(down))


class Slopes(NamedTuple):
    """What the backward pass of the middle gives."""

    product: Fp8Matrix
    """silu(gate) * up, turned over."""
    slopes: Fp8Matrix
    """The gradients of gate and up, side by side."""


def gate_peaks(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> Tensor:
    """`peaks_of` the product or, where there is `grad`, of the gradients of both sides."""
    if not is_fused(gate):
        return gate_peaks_plain(gate, up, grad)
    return gate_peaks_triton(gate, up, grad)


def gate_peaks_plain(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> Tensor:
    """The plain twin of `gate_peaks`."""
    return peaks_plain([_product(gate, up)] if grad is None else slopes_plain(gate, up, grad)[:2])


def cast_product(
    gate: Tensor, up: Tensor, peaks: Tensor, *, notes: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    """The product in 8 bits, as it lies; `notes` and `saturates` are those of `cast`."""
    if not is_fused(gate):
        return cast_product_plain(gate, up, peaks, notes=notes, saturates=saturates)
    rows, inverse = gate.new_empty(gate.shape, dtype=E4M3), peaks.new_empty(())
    product_triton(gate, up, peaks, rows, inverse, SMALLEST, notes=notes, saturates=saturates)
    return Fp8Matrix(rows, rows.new_empty(0), inverse)


def cast_product_plain(
    gate: Tensor, up: Tensor, peaks: Tensor, *, notes: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    """The plain twin of `cast_product`."""
    product = [_product(gate, up)]
    return cast_plain(product, peaks, E4M3, rows=True, columns=False, notes=notes, saturates=saturates)


def cast_slopes(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    peaks: tuple[Tensor, Tensor],
    *,
    rows: bool,
    notes: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    """The product and the gradients of both sides in 8 bits; `peaks` are those of one and the other.

    The two `notes` are of the gradients: that of the product was taken when it was made first.
    """
    if not is_fused(gate):
        return cast_slopes_plain(gate, up, grad, peaks, rows=rows, notes=notes, saturates=saturates)
    height, width = gate.shape
    padded = height + -height % MULTIPLE
    none = gate.new_empty(0, dtype=E5M2)
    by_row = gate.new_empty(height, 2 * width, dtype=E5M2) if rows else none
    by_column = gate.new_empty(2 * width, padded, dtype=E5M2)
    product = gate.new_empty(width, padded, dtype=E4M3)
    inverses = peaks[0].new_empty(()), peaks[0].new_empty(())
    slopes_triton(
        gate,
        up,
        grad,
        peaks,
        product=product,
        rows=by_row if rows else None,
        columns=by_column,
        inverses=inverses,
        smallest=SMALLEST,
        notes=notes,
        saturates=saturates,
    )
    return Slopes(Fp8Matrix(none, product, inverses[0]), Fp8Matrix(by_row, by_column, inverses[1]))


def cast_slopes_plain(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    peaks: tuple[Tensor, Tensor],
    *,
    rows: bool,
    notes: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    """The plain twin of `cast_slopes`."""
    product, slopes = [_product(gate, up)], slopes_plain(gate, up, grad)[:2]
    return Slopes(
        cast_plain(product, peaks[0], E4M3, rows=False, columns=True, saturates=saturates),
        cast_plain(slopes, peaks[1], E5M2, dim=1, rows=rows, columns=True, notes=notes, saturates=saturates),
    )


def _product(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * wide.sigmoid() * up.float()).to(gate.dtype)


class _Fp8GatedInner(torch.autograd.Function):
    """All but the last product; its backward is that of the whole.

    See [Note: between the products]; [Note: layers of one input] in `fp8`; [Note: kept before multiplied] in `gated`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keeps: bool,
        emulated: bool,
        earlier: Earlier,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        before, after = earlier.part(0, 2), earlier.part(2, 3)  # the middle
        small = before.cast(INPUT, [x], before.peaks_of(INPUT, [x]), rows=True, columns=keeps)
        pair = gate_weight, up_weight
        pair_peaks = before.peaks_of(WEIGHT, pair)
        stacked = before.cast(WEIGHT, pair, pair_peaks, rows=True, columns=False)
        inverses = small.inverse, stacked.inverse
        gate, up = (
            scaled_product(small.rows, part.t(), inverses, x.dtype, fast=True, emulated=emulated)
            for part in stacked.rows.split_with_sizes([len(weight) for weight in pair])
        )
        peaks = gate_peaks(gate, up) if after.peaks is None else after.peaks[INPUT]
        down_peaks = after.peaks_of(WEIGHT, [down_weight])
        ctx.save_for_backward(small.columns, small.inverse, pair_peaks, down_peaks, peaks, gate, up, *pair, down_weight)
        ctx.set_materialize_grads(False)
        ctx.emulated, ctx.earlier = emulated, earlier
        product = cast_product(gate, up, peaks, notes=after.notes_of(INPUT), saturates=after.saturates)
        last = after.cast(WEIGHT, [down_weight], down_peaks, rows=True, columns=False)
        factors = product.rows, product.inverse, last.rows, last.inverse
        ctx.mark_non_differentiable(*factors)
        return x.new_empty(()).expand(len(x), len(down_weight)), *factors

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        columns, inverse, pair_peaks, down_peaks, peaks, gate, up, *pair, down_weight = ctx.saved_tensors
        before, after = ctx.earlier.part(0, 2), ctx.earlier.part(2, 3)
        multiply = partial(scaled_product, fast=False, emulated=ctx.emulated)
        grad = grad.contiguous()
        small = after.cast(GRADIENT, [grad], after.peaks_of(GRADIENT, [grad]), rows=True, columns=True)
        last = cast([down_weight], down_peaks, E4M3, rows=False, columns=True, saturates=after.saturates)
        inner = multiply(small.rows, last.columns.t(), (small.inverse, last.inverse), grad.dtype)
        product, slopes = cast_slopes(
            gate,
            up,
            inner,
            (peaks, gate_peaks(gate, up, inner) if before.peaks is None else before.peaks[GRADIENT]),
            rows=ctx.needs_input_grad[0],
            notes=before.notes_of(GRADIENT),
            saturates=before.saturates,
        )
        del inner
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            stacked = cast(pair, pair_peaks, E4M3, rows=False, columns=True, saturates=before.saturates)
            grad_x = multiply(slopes.rows, stacked.columns.t(), (slopes.inverse, stacked.inverse), grad.dtype)
        if not ctx.needs_input_grad[4]:
            return grad_x, None, None, None, None, None, None
        dtype = down_weight.dtype
        grad_down = multiply(small.columns, product.columns.t(), (small.inverse, product.inverse), dtype)
        grad_pair = multiply(slopes.columns, columns.t(), (slopes.inverse, inverse), dtype)
        return grad_x, None, None, None, *grad_pair.split_with_sizes([len(weight) for weight in pair]), grad_down


class _Fp8GatedLast(torch.autograd.Function):
    """The last product; hands its gradient on as it is."""

    @staticmethod
    def forward(
        ctx: Any, thread: Tensor, emulated: bool, rows: Tensor, inverse: Tensor, weight: Tensor, weight_inverse: Tensor
    ) -> Tensor:
        return scaled_product(rows, weight.t(), (inverse, weight_inverse), thread.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None
