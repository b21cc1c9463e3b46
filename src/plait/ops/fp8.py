"""A linear layer whose three matrix products are computed from 8-bit numbers.

[Note: numbers in 8 bits] Eight bits hold few numbers in a narrow range, so a tensor is stretched to that range first:
it is multiplied by a scale, found from its largest number each time, and rounded; the product is divided by both
scales. What the optimizer and the other layers see stays in 16 bits.

- `tensorwise`: one scale for a tensor. Activations and weights are e4m3, gradients, which vary more, e5m2.
- `rowwise`: one scale for each row that is summed over, so a large number costs its own row only; all are e4m3. In the
  backward pass other dimensions are summed over, so tensors are scaled anew there.

The operations are written out, for `torch.compile` to fuse with what stands before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""What both sides of a matrix must be a multiple of."""
_SMALLEST = 1e-12
"""A tensor of zeros has no scale; a smaller number than this counts as zero."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, rowwise: bool, emulated: bool) -> Tensor:
    """`F.linear` with products in 8 bits, of 16-bit tensors; the features on both sides are multiples of 16.

    `emulated`: rounded to 8 bits in the same way, multiplied in fp32. For devices without such products.
    """
    flat: Tensor = _Linear.apply(x.flatten(0, -2), weight, rowwise, emulated)  # type: ignore[no-untyped-call]
    y = flat.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What a tensor is multiplied by to fill the range of `dtype`, fp32; one for each slice along `dim`."""
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None)
    return largest.float().clamp(min=_SMALLEST).reciprocal() * torch.finfo(dtype).max


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scaled tensor in 8 bits, row by row. Rounding may not lead out of the range: there is only NaN."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool, emulated: bool
) -> Tensor:
    """`a @ b`, in `dtype`, of 8-bit matrices that were multiplied by these scales.

    `a` lies row by row, `b` column by column. `fast` adds up with fewer bits.
    """
    if not emulated:
        return torch._scaled_mm(
            a, b, scale_a=a_scale.reciprocal(), scale_b=b_scale.reciprocal(), out_dtype=dtype, use_fast_accum=fast
        )
    with torch.autocast(a.device.type, enabled=False):
        return (torch.mm(a.float(), b.float()) / a_scale / b_scale).to(dtype)


class _Linear(torch.autograd.Function):
    """The three products of a linear layer without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, emulated: bool) -> Tensor:
        along = 1 if rowwise else None
        x_scale, w_scale = scale_of(x, E4M3, along), scale_of(weight, E4M3, along)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.rowwise, ctx.emulated = rowwise, emulated
        a, b = rounded(x, x_scale, E4M3), rounded(weight, w_scale, E4M3).t()
        return scaled_product(a, x_scale, b, w_scale.t() if rowwise else w_scale, x.dtype, fast=True, emulated=emulated)

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
            grad_x = scaled_product(a, g_scale, b, w_scale, x.dtype, fast=False, emulated=emulated)
        if ctx.needs_input_grad[1]:
            if rowwise:
                g_scale, x_scale = scale_of(grad, small, 0), scale_of(x, E4M3, 0)
            missing = -len(x) % MULTIPLE  # tokens are what is summed over here
            if missing:
                grad, x = F.pad(grad, (0, 0, 0, missing)), F.pad(x, (0, 0, 0, missing))
            a, b = rounded(grad, g_scale, small).t().contiguous(), _by_column(rounded(x, x_scale, E4M3))
            scale = g_scale.t() if rowwise else g_scale
            grad_weight = scaled_product(a, scale, b, x_scale, weight.dtype, fast=False, emulated=emulated)
        return grad_x, grad_weight, None, None


def _by_column(x: Tensor) -> Tensor:
    """The same matrix, lying column by column."""
    return x.t().contiguous().t()
