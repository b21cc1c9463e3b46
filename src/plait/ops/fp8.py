"""Linear layers whose three matrix products are computed from 8-bit numbers.

[Note: numbers in 8 bits] Eight bits hold few numbers in a narrow range, so a tensor is stretched to that range first:
it is multiplied by a scale, found from its largest number, and rounded; the product is divided by both scales. What
the optimizer and the other layers see stays in 16 bits.

- `tensorwise`: one scale for a tensor. Activations and weights are e4m3, gradients, which vary more, e5m2.
- `rowwise`: one scale for each row that is summed over, so a large number costs its own row only; all are e4m3. In the
  backward pass other dimensions are summed over, so tensors are scaled anew there.

[Note: layers of one input] Queries, keys and values are made from one input, and so are the two sides of a gate. It is
rounded once for all of them, and the copy that their weights' gradients will want is made in the same reading: that is
what is kept, in place of the input itself, at half its size. On the way back the gradients of all outputs lie side by
side, so that one product adds up the input's gradient, and one gives those of all weights. Hence such layers have one
scale for their weights, and one for their gradients.

For `rowwise`, and for `torch.compile` to fuse with what stands before them, the operations are written out, layer by
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops.fp8_cast import E4M3, E5M2, MULTIPLE, cast, rounded, scale_of
from plait.ops.fp8_earlier import AT_ONCE, GRADIENT, INPUT, WEIGHT, Earlier
from plait.torch_internals import scaled_mm


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, rowwise: bool, emulated: bool) -> Tensor:
    """`F.linear` with products in 8 bits, of 16-bit tensors; the features on both sides are multiples of 16.

    `emulated`: rounded to 8 bits in the same way, multiplied in fp32. For devices without such products.
    """
    return fp8_linears(x, [weight], [bias], rowwise=rowwise, emulated=emulated)[0]


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    rowwise: bool,
    emulated: bool,
    earlier: Earlier = AT_ONCE,
) -> tuple[Tensor, ...]:
    """`fp8_linear` for layers that have one input; see [Note: layers of one input].

    `earlier` is what is known of each layer, for `tensorwise` that is not compiled.
    """
    flat = x.flatten(0, -2)
    outputs: tuple[Tensor, ...]
    if rowwise or torch.compiler.is_compiling():
        outputs = tuple(_Linear.apply(flat, weight, rowwise, emulated) for weight in weights)  # type: ignore[no-untyped-call]
    else:
        keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        outputs = _Linears.apply(flat, keeps, emulated, earlier, *weights)  # type: ignore[no-untyped-call]
    shaped = [y.view(*x.shape[:-1], y.shape[-1]) for y in outputs]
    return tuple(y if bias is None else y + bias for y, bias in zip(shaped, biases, strict=True))


def scaled_product(
    a: Tensor, b: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, emulated: bool
) -> Tensor:
    """`a @ b`, in `dtype`, of 8-bit matrices that are to be multiplied by these numbers.

    `a` lies row by row, `b` column by column. `fast` adds up with fewer bits.
    """
    if not emulated:
        return scaled_mm(a, b, scale_a=inverses[0], scale_b=inverses[1], out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return (torch.mm(a.float(), b.float()) * inverses[0] * inverses[1]).to(dtype)


class _Linears(torch.autograd.Function):
    """The products of linear layers that have one input, with one scale a tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keeps: bool, emulated: bool, earlier: Earlier, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        small = earlier.cast(INPUT, [x], earlier.peaks_of(INPUT, [x]), rows=True, columns=keeps)
        peaks = earlier.peaks_of(WEIGHT, weights)
        stacked = earlier.cast(WEIGHT, weights, peaks, rows=True, columns=False)
        # Weights are rounded again on the way back: a sharded one is not here all the time, and its copy would be.
        ctx.save_for_backward(small.columns, small.inverse, peaks, *weights)
        ctx.emulated, ctx.earlier = emulated, earlier
        inverses = small.inverse, stacked.inverse
        return tuple(
            scaled_product(small.rows, part.t(), inverses, x.dtype, fast=True, emulated=emulated)
            for part in stacked.rows.split_with_sizes([len(weight) for weight in weights])
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, inverse, peaks, *weights = ctx.saved_tensors
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        earlier: Earlier = ctx.earlier
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        grads = tuple(grad.contiguous() for grad in grads)
        grad_peaks = earlier.peaks_of(GRADIENT, grads)
        small = earlier.cast(GRADIENT, grads, grad_peaks, dim=1, rows=needs_x, columns=any(needed))
        if needs_x:
            stacked = cast(weights, peaks, E4M3, rows=False, columns=True, saturates=earlier.saturates)
            inverses = small.inverse, stacked.inverse
            b = stacked.columns.t()
            grad_x = scaled_product(small.rows, b, inverses, grads[0].dtype, fast=False, emulated=ctx.emulated)
        if any(needed):
            inverses, dtype = (small.inverse, inverse), weights[0].dtype
            whole = scaled_product(small.columns, columns.t(), inverses, dtype, fast=False, emulated=ctx.emulated)
            parts = whole.split_with_sizes([len(weight) for weight in weights])
            grad_weights = [part if wanted else None for part, wanted in zip(parts, needed, strict=True)]
        return grad_x, None, None, None, *grad_weights


class _Linear(torch.autograd.Function):
    """The three products of one linear layer, in operations that a compiler can fuse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, emulated: bool) -> Tensor:
        along = 1 if rowwise else None
        x_scale, w_scale = scale_of(x, E4M3, along), scale_of(weight, E4M3, along)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.rowwise, ctx.emulated = rowwise, emulated
        a, b = rounded(x, x_scale, E4M3), rounded(weight, w_scale, E4M3).t()
        return _product(a, x_scale, b, w_scale.t() if rowwise else w_scale, x.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        rowwise, emulated = ctx.rowwise, ctx.emulated
        small = E4M3 if rowwise else E5M2
        grad_x = grad_weight = None
        g_scale = scale_of(grad, small, 1 if rowwise else None)
        if ctx.needs_input_grad[0]:
            if rowwise:
                w_scale = scale_of(weight, E4M3, 0)
            a, b = rounded(grad, g_scale, small), _by_column(rounded(weight, w_scale, E4M3))
            grad_x = _product(a, g_scale, b, w_scale, x.dtype, fast=False, emulated=emulated)
        if ctx.needs_input_grad[1]:
            if rowwise:
                g_scale, x_scale = scale_of(grad, small, 0), scale_of(x, E4M3, 0)
            missing = -len(x) % MULTIPLE  # tokens are what is summed over here
            if missing:
                grad, x = F.pad(grad, (0, 0, 0, missing)), F.pad(x, (0, 0, 0, missing))
            a, b = rounded(grad, g_scale, small).t().contiguous(), _by_column(rounded(x, x_scale, E4M3))
            scale = g_scale.t() if rowwise else g_scale
            grad_weight = _product(a, scale, b, x_scale, weight.dtype, fast=False, emulated=emulated)
        return grad_x, grad_weight, None, None


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool, emulated: bool
) -> Tensor:
    return scaled_product(a, b, (a_scale.reciprocal(), b_scale.reciprocal()), dtype, fast=fast, emulated=emulated)


def _by_column(x: Tensor) -> Tensor:
    """The same matrix, lying column by column."""
    return x.t().contiguous().t()
