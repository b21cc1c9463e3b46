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

from plait.ops.fp8 import scaled_product
from plait.ops.fp8_cast import E4M3, E5M2, MULTIPLE, SMALLEST, Cast, cast, cast_plain, is_fused, peaks_plain
from plait.ops.fp8_earlier import AT_ONCE, GRADIENT, INPUT, WEIGHT, Earlier
from plait.ops.fp8_gated_kernel import gate_peaks_triton, product_triton, slopes_triton
from plait.ops.swiglu import slopes_plain


def fp8_feed_forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, emulated: bool, earlier: Earlier = AT_ONCE
) -> Tensor:
    """`down(silu(gate(x)) * up(x))` of layers without bias that all learn, or none does; one scale a tensor.

    `earlier` is what is known of the three layers.
    """
    keeps = torch.is_grad_enabled() and gate.requires_grad
    given = x.flatten(0, -2), keeps, emulated, earlier, gate, up, down
    thread, *factors = _Inner.apply(*given)  # type: ignore[no-untyped-call]
    flat: Tensor = _Last.apply(thread, emulated, *factors)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], len(down))


class Slopes(NamedTuple):
    """What the backward pass of the middle gives."""

    product: Cast
    """silu(gate) * up, turned over."""
    slopes: Cast
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
) -> Cast:
    """The product in 8 bits, as it lies; `notes` and `saturates` are those of `cast`."""
    if not is_fused(gate):
        return cast_product_plain(gate, up, peaks, notes=notes, saturates=saturates)
    rows, inverse = gate.new_empty(gate.shape, dtype=E4M3), peaks.new_empty(())
    product_triton(gate, up, peaks, rows, inverse, SMALLEST, notes=notes, saturates=saturates)
    return Cast(rows, rows.new_empty(0), inverse)


def cast_product_plain(
    gate: Tensor, up: Tensor, peaks: Tensor, *, notes: Tensor | None = None, saturates: bool = False
) -> Cast:
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
    return Slopes(Cast(none, product, inverses[0]), Cast(by_row, by_column, inverses[1]))


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


class _Inner(torch.autograd.Function):
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


class _Last(torch.autograd.Function):
    """The last product; hands its gradient on as it is."""

    @staticmethod
    def forward(
        ctx: Any, thread: Tensor, emulated: bool, rows: Tensor, inverse: Tensor, weight: Tensor, weight_inverse: Tensor
    ) -> Tensor:
        return scaled_product(rows, weight.t(), (inverse, weight_inverse), thread.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None
