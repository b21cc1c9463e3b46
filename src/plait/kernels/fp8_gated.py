"""A gated feed-forward in 8 bits, as one operation.

Names in this file: `gate` and `up` are the outputs of the first two layers (in `fp8_feed_forward`, their weights); the
*product* is the elementwise silu(gate) * up; *slopes* are the gradients with respect to gate and up. `_plain` functions
are torch operations, `_triton` functions launch a kernel with the same result.

[Note: between the products] The matrix multiplications take the product and the slopes in 8 bits. So these are never
stored in 16 bits: one kernel computes them for their amax, and another computes them again and casts them. Where the
scale is known beforehand ([Note: scales of earlier steps]), only the second runs. The forward pass saves gate and up;
the backward pass recomputes the product in the kernel that computes the slopes. The results are those of `fp8_linears`,
`swiglu` and `fp8_linear` in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.kernels.fp8 import (
    AMAX_PROGRAMS,
    CURRENT_SCALES,
    E4M3,
    E5M2,
    GRADIENT,
    INPUT,
    MULTIPLE,
    READ,
    SMALLEST,
    WEIGHT,
    DelayedScales,
    Fp8Matrix,
    amax_plain,
    amax_slots,
    fp8_cast,
    fp8_cast_plain,
    has_fp8_kernels,
    programs_for,
    scaled_product,
)
from plait.kernels.swiglu import slopes_plain
from plait.kernels.triton import HAS_TRITON, interprets, on_device_of

_TALL, _WIDE = 64, 64
"""Rows and columns of a tile."""
_READ = READ // 2
"""Elements that a program reads at a time of each of its two or three inputs."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.fp8 import fitted, pack_pair, record_amax, scale_from, size_bits, store_transposed

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _as_stored(value, like):  # type: ignore[no-untyped-def]
        """Round to the dtype of `like`, as separate kernels would when they store the value."""
        return value.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _gate_amax_kernel(gate, up, grad, amax, count, slopes: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Compute partial amax values of the product or, with `slopes`, of the slopes."""
        program = tl.program_id(0)
        blocks = tl.cdiv(count, block)
        at = tl.arange(0, block)
        largest = tl.zeros((block,), dtype=tl.int32)
        for index in range(program, blocks, tl.num_programs(0)):
            offset = (blocks - 1 - index).to(tl.int64) * block + at
            inside = offset < count
            g = tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            if slopes:
                d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, size_bits(_as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)))
                largest = tl.maximum(largest, size_bits(_as_stored(d * g * s, gate)))
            else:
                largest = tl.maximum(largest, size_bits(_as_stored(g * s * u, gate)))
        tl.store(amax + program, tl.max(largest, 0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _product_kernel(  # type: ignore[no-untyped-def]
        gate,
        up,
        amax,
        amax_count,
        rows,
        inverse,
        amax_bits,
        height,
        width,
        smallest,
        limit,
        amax_bits_count: tl.constexpr,
        saturates: tl.constexpr,
        amax_block: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """Compute the product and cast it; one program per tile."""
        across = tl.cdiv(width, wide)
        down = (tl.program_id(0) // across).to(tl.int64) * tall + tl.arange(0, tall)
        right = (tl.program_id(0) % across).to(tl.int64) * wide + tl.arange(0, wide)
        inside = (down < height)[:, None] & (right < width)[None, :]
        offset = down[:, None] * width + right[None, :]
        g = tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
        scale = scale_from(amax, amax_count, smallest, limit, inverse, amax_block)
        product = _as_stored(g * tl.sigmoid(g) * u, gate)
        tl.store(rows + offset, fitted(product, scale, limit, saturates).to(rows.dtype.element_ty), mask=inside)
        record_amax(size_bits(product), amax_bits, amax_bits_count)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _slopes_kernel(  # type: ignore[no-untyped-def]
        gate,
        up,
        grad,
        product_amax,
        product_amax_count,
        amax,
        amax_count,
        product_columns,
        rows,
        columns,
        product_inverse,
        inverse,
        amax_bits,
        height,
        width,
        padded,
        smallest,
        product_limit,
        limit,
        has_rows: tl.constexpr,
        amax_bits_count: tl.constexpr,
        saturates: tl.constexpr,
        amax_block: tl.constexpr,
        by_hand: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """Compute and cast the product, transposed, and the concatenated slopes, as they are and transposed.

        One program per tile; see [Note: transposed in words of four bytes] in `fp8`. `amax_bits` has `amax_bits_count`
        values for the gradient of gate, then as many for that of up. `by_hand`: Triton's interpreter runs the kernel.
        """
        across = tl.cdiv(width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter)[:, None], left + tl.arange(0, wide)[None, :]
        gate, up, grad = gate + top * width, up + top * width, grad + top * width
        rows, below = rows + top * (2 * width), height - top
        product_scale = scale_from(
            product_amax, product_amax_count, smallest, product_limit, product_inverse, amax_block
        )
        scale = scale_from(amax, amax_count, smallest, limit, inverse, amax_block)
        nothing = tl.zeros((quarter, wide), dtype=tl.int32)
        seen_gate, seen_up = nothing, nothing
        product_packed, gate_packed, up_packed = nothing, nothing, nothing
        for step in tl.static_range(4):
            at = down + step
            inside = (at < below) & (right < width)
            offset = at * width + right
            g = tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            product = fitted(_as_stored(g * s * u, gate), product_scale, product_limit, saturates)
            slope = _as_stored(d * u * s * (1.0 + g * (1.0 - s)), gate)
            seen_gate = tl.maximum(seen_gate, size_bits(slope))
            of_gate = fitted(slope, scale, limit, saturates)
            slope = _as_stored(d * g * s, gate)
            seen_up = tl.maximum(seen_up, size_bits(slope))
            of_up = fitted(slope, scale, limit, saturates)
            if has_rows:
                row_pair = rows + at * (2 * width) + right
                tl.store(row_pair, of_gate.to(rows.dtype.element_ty), mask=inside)
                tl.store(row_pair + width, of_up.to(rows.dtype.element_ty), mask=inside)
            if step % 2 == 0:
                product_before, gate_before, up_before = product, of_gate, of_up
            else:
                product_packed |= pack_pair(product_before, product, product_columns, by_hand) << (8 * (step - 1))
                gate_packed |= pack_pair(gate_before, of_gate, columns, by_hand) << (8 * (step - 1))
                up_packed |= pack_pair(up_before, of_up, columns, by_hand) << (8 * (step - 1))
        record_amax(seen_gate, amax_bits, amax_bits_count)
        record_amax(seen_up, amax_bits + amax_bits_count, amax_bits_count)
        store_transposed(product_packed, product_columns, padded, top, left, padded, width, quarter, wide)
        store_transposed(gate_packed, columns, padded, top, left, padded, width, quarter, wide)
        store_transposed(
            up_packed, columns + padded.to(tl.int64) * width, padded, top, left, padded, width, quarter, wide
        )


def _gate_amax_fake(gate: Tensor, up: Tensor, grad: Tensor | None) -> Tensor:
    return torch.stack([x.amax() for x in (gate, up, grad) if x is not None])[0].float().repeat(AMAX_PROGRAMS)


@on_fake_tensors(_gate_amax_fake)
def gate_amax_triton(gate: Tensor, up: Tensor, grad: Tensor | None) -> Tensor:
    """Return partial amax values, fp32, of the product or, with `grad` (the product's gradient), of the slopes."""
    programs = programs_for(gate.numel(), _READ)
    amax = torch.empty(programs, dtype=torch.float32, device=gate.device)
    with on_device_of(gate):
        _gate_amax_kernel[(programs,)](
            gate,
            up,
            gate if grad is None else grad,
            amax,
            gate.numel(),
            slopes=grad is not None,
            block=_READ,
            num_warps=16,
        )
    return amax


def _cast_product_fake(
    gate: Tensor, up: Tensor, amax: Tensor, *, amax_bits: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    rows = gate.new_empty(gate.shape, dtype=E4M3).copy_(gate)
    up.amax()
    return Fp8Matrix(rows, rows.new_empty(0), amax.new_empty(()))


@on_fake_tensors(_cast_product_fake)
def cast_product_triton(
    gate: Tensor, up: Tensor, amax: Tensor, *, amax_bits: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    """`cast_product_plain` of contiguous matrices in one kernel."""
    height, width = gate.shape
    rows, inverse = gate.new_empty(gate.shape, dtype=E4M3), amax.new_empty(())
    with on_device_of(gate):
        _product_kernel[(_programs(height, width),)](
            gate,
            up,
            amax,
            len(amax),
            rows,
            inverse,
            amax if amax_bits is None else amax_bits,
            height,
            width,
            SMALLEST,
            torch.finfo(E4M3).max,
            amax_bits_count=0 if amax_bits is None else len(amax_bits),
            saturates=saturates,
            amax_block=amax_slots(amax),
            tall=_TALL,
            wide=_WIDE,
            num_warps=8,
        )
    return Fp8Matrix(rows, rows.new_empty(0), inverse)


class Slopes(NamedTuple):
    """The two results of the elementwise part of the backward pass, in 8 bits."""

    product: Fp8Matrix
    """silu(gate) * up, transposed."""
    slopes: Fp8Matrix
    """The gradients of gate and up, concatenated."""

    @classmethod
    def empty(cls, gate: Tensor, amax: tuple[Tensor, Tensor], *, rows: bool) -> Slopes:
        """Return uninitialized matrices; `rows`: the slopes also as they are, not only transposed."""
        height, width = gate.shape
        padded = height + -height % MULTIPLE
        none = gate.new_empty(0, dtype=E5M2)
        by_row = gate.new_empty(height, 2 * width, dtype=E5M2) if rows else none
        by_column = gate.new_empty(2 * width, padded, dtype=E5M2)
        product = gate.new_empty(width, padded, dtype=E4M3)
        inverses = amax[0].new_empty(()), amax[1].new_empty(())
        return cls(Fp8Matrix(none, product, inverses[0]), Fp8Matrix(by_row, by_column, inverses[1]))


def _cast_slopes_fake(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    amax: tuple[Tensor, Tensor],
    *,
    rows: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    height, width = gate.shape
    cast = Slopes.empty(gate, amax, rows=rows)
    columns = cast.slopes.columns
    for target, x in ((cast.product.columns, gate), (columns[:width], up), (columns[width:], grad)):
        target[:, :height].copy_(x.t())
    if rows:
        cast.slopes.rows.copy_(columns[:, :height].t())
    return cast


@on_fake_tensors(_cast_slopes_fake)
def cast_slopes_triton(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    amax: tuple[Tensor, Tensor],
    *,
    rows: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    """`cast_slopes_plain` of contiguous matrices in one kernel."""
    height, width = gate.shape
    cast = Slopes.empty(gate, amax, rows=rows)
    product, columns = cast.product.columns, cast.slopes.columns
    padded = product.shape[1]
    with on_device_of(gate):
        _slopes_kernel[(_programs(padded, width),)](
            gate,
            up,
            grad,
            amax[0],
            len(amax[0]),
            amax[1],
            len(amax[1]),
            product,
            cast.slopes.rows if rows else columns,
            columns,
            cast.product.inverse,
            cast.slopes.inverse,
            amax[0] if amax_bits is None else amax_bits,
            height,
            width,
            padded,
            SMALLEST,
            torch.finfo(E4M3).max,
            torch.finfo(E5M2).max,
            has_rows=rows,
            amax_bits_count=0 if amax_bits is None else 1,
            saturates=saturates,
            amax_block=max(map(amax_slots, amax)),
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )
    return cast


def _programs(height: int, width: int) -> int:
    return int(triton.cdiv(height, _TALL) * triton.cdiv(width, _WIDE))


def fp8_feed_forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, emulated: bool, earlier: DelayedScales = CURRENT_SCALES
) -> Tensor:
    """Return `down(silu(gate(x)) * up(x))` for three weights without bias, all trainable or all frozen.

    Every tensor is cast with one scale. `earlier` has the amax values of earlier steps, a column for each of the three
    layers in the order gate, up, down; by default scales are those of the tensors themselves.
    """
    keeps = torch.is_grad_enabled() and gate.requires_grad
    given = x.flatten(0, -2), keeps, emulated, earlier, gate, up, down
    thread, *factors = _Fp8GatedInner.apply(*given)  # type: ignore[no-untyped-call]
    flat: Tensor = _Fp8GatedLast.apply(thread, emulated, *factors)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], len(down))


def gate_amax(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> Tensor:
    """Return what `amax_of` returns for the product or, with `grad` (the product's gradient), for the slopes."""
    if not has_fp8_kernels(gate):
        return gate_amax_plain(gate, up, grad)
    return gate_amax_triton(gate, up, grad)


def gate_amax_plain(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> Tensor:
    """Return what `gate_amax` returns, by torch operations."""
    return amax_plain([_product(gate, up)] if grad is None else slopes_plain(gate, up, grad)[:2])


def cast_product(
    gate: Tensor, up: Tensor, amax: Tensor, *, amax_bits: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    """Return the product in 8 bits, not transposed; `amax_bits` and `saturates` are those of `fp8_cast`."""
    cast = cast_product_triton if has_fp8_kernels(gate) else cast_product_plain
    return cast(gate, up, amax, amax_bits=amax_bits, saturates=saturates)


def cast_product_plain(
    gate: Tensor, up: Tensor, amax: Tensor, *, amax_bits: Tensor | None = None, saturates: bool = False
) -> Fp8Matrix:
    """Return what `cast_product` returns, by torch operations."""
    product = [_product(gate, up)]
    return fp8_cast_plain(product, amax, E4M3, rows=True, columns=False, amax_bits=amax_bits, saturates=saturates)


def cast_slopes(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    amax: tuple[Tensor, Tensor],
    *,
    rows: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    """Return the product and the slopes in 8 bits. `grad` is the product's gradient; `amax` are (product's, slopes').

    The two values of `amax_bits` are for the slopes: the product's amax was recorded in the forward pass.
    """
    cast = cast_slopes_triton if has_fp8_kernels(gate) else cast_slopes_plain
    return cast(gate, up, grad, amax, rows=rows, amax_bits=amax_bits, saturates=saturates)


def cast_slopes_plain(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    amax: tuple[Tensor, Tensor],
    *,
    rows: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Slopes:
    """Return what `cast_slopes` returns, by torch operations."""
    product, slopes = [_product(gate, up)], slopes_plain(gate, up, grad)[:2]
    return Slopes(
        fp8_cast_plain(product, amax[0], E4M3, rows=False, columns=True, saturates=saturates),
        fp8_cast_plain(slopes, amax[1], E5M2, dim=1, rows=rows, columns=True, amax_bits=amax_bits, saturates=saturates),
    )


def _product(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * wide.sigmoid() * up.float()).to(gate.dtype)


class _Fp8GatedInner(torch.autograd.Function):
    """All of the feed-forward but the last matrix multiplication; its backward pass is that of the whole feed-forward.

    The first output, `thread`, has no values. It has the shape of the feed-forward's output and connects this function
    to `_Fp8GatedLast` in the autograd graph, which passes the gradient of its output back through it.

    See [Note: between the products]; [Note: layers of one input] in `fp8`; [Note: saved before multiplied] in
    `linears`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keeps: bool,
        emulated: bool,
        earlier: DelayedScales,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        before, after = earlier.of_layers(0, 2), earlier.of_layers(2, 3)  # of gate and up; of down
        small = before.fp8_cast(INPUT, [x], before.amax_of(INPUT, [x]), rows=True, columns=keeps)
        pair = gate_weight, up_weight
        pair_amax = before.amax_of(WEIGHT, pair)
        stacked = before.fp8_cast(WEIGHT, pair, pair_amax, rows=True, columns=False)
        inverses = small.inverse, stacked.inverse
        gate, up = (
            scaled_product(small.rows, stacked_weight.t(), inverses, x.dtype, fast=True, emulated=emulated)
            for stacked_weight in stacked.rows.split_with_sizes([len(weight) for weight in pair])
        )
        amax = gate_amax(gate, up) if after.amax is None else after.amax[INPUT]
        down_amax = after.amax_of(WEIGHT, [down_weight])
        ctx.save_for_backward(small.columns, small.inverse, pair_amax, down_amax, amax, gate, up, *pair, down_weight)
        ctx.set_materialize_grads(False)
        ctx.emulated, ctx.earlier = emulated, earlier
        product = cast_product(gate, up, amax, amax_bits=after.amax_bits_of(INPUT), saturates=after.saturates)
        last = after.fp8_cast(WEIGHT, [down_weight], down_amax, rows=True, columns=False)
        factors = product.rows, product.inverse, last.rows, last.inverse
        ctx.mark_non_differentiable(*factors)
        return x.new_empty(()).expand(len(x), len(down_weight)), *factors

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        columns, inverse, pair_amax, down_amax, amax, gate, up, *pair, down_weight = ctx.saved_tensors
        before, after = ctx.earlier.of_layers(0, 2), ctx.earlier.of_layers(2, 3)
        multiply = partial(scaled_product, fast=False, emulated=ctx.emulated)
        grad = grad.contiguous()
        small = after.fp8_cast(GRADIENT, [grad], after.amax_of(GRADIENT, [grad]), rows=True, columns=True)
        last = fp8_cast([down_weight], down_amax, E4M3, rows=False, columns=True, saturates=after.saturates)
        inner = multiply(small.rows, last.columns.t(), (small.inverse, last.inverse), grad.dtype)
        product, slopes = cast_slopes(
            gate,
            up,
            inner,
            (amax, gate_amax(gate, up, inner) if before.amax is None else before.amax[GRADIENT]),
            rows=ctx.needs_input_grad[0],
            amax_bits=before.amax_bits_of(GRADIENT),
            saturates=before.saturates,
        )
        del inner
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            stacked = fp8_cast(pair, pair_amax, E4M3, rows=False, columns=True, saturates=before.saturates)
            grad_x = multiply(slopes.rows, stacked.columns.t(), (slopes.inverse, stacked.inverse), grad.dtype)
        if not ctx.needs_input_grad[4]:
            return grad_x, None, None, None, None, None, None
        dtype = down_weight.dtype
        grad_down = multiply(small.columns, product.columns.t(), (small.inverse, product.inverse), dtype)
        grad_pair = multiply(slopes.columns, columns.t(), (slopes.inverse, inverse), dtype)
        return grad_x, None, None, None, *grad_pair.split_with_sizes([len(weight) for weight in pair]), grad_down


class _Fp8GatedLast(torch.autograd.Function):
    """The last matrix multiplication; passes the gradient of its output on unchanged, see `_Fp8GatedInner`."""

    @staticmethod
    def forward(
        ctx: Any, thread: Tensor, emulated: bool, rows: Tensor, inverse: Tensor, weight: Tensor, weight_inverse: Tensor
    ) -> Tensor:
        return scaled_product(rows, weight.t(), (inverse, weight_inverse), thread.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None
