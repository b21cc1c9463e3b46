"""RMSNorm of a tensor, or of the sum of two: one kernel for the forward pass and one for the backward pass.

Where the kernels cannot run, torch operations are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, on_device_of

_PROGRAMS = 512
"""Programs of the backward pass over wide rows; each sums the weight's gradient over its rows. Narrow rows get more
programs, because few programs with little work would not keep an SM busy."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _forward_kernel(  # type: ignore[no-untyped-def]
        x, residual, weight, total, out, scales, width, eps, has_residual: tl.constexpr, block: tl.constexpr
    ):
        """Normalize one row of `x` per program or, with `has_residual`, of `x + residual`, stored in `total`."""
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, block)
        inside = at < width
        offset = row * width + at
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        if has_residual:
            value += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
            # The residual stream is the rounded sum, so the norm is computed from that.
            sum_rounded = value.to(total.dtype.element_ty)
            tl.store(total + offset, sum_rounded, mask=inside)
            value = sum_rounded.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(scales + row, scale)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + offset, (value * scale * w).to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _backward_kernel(  # type: ignore[no-untyped-def]
        x,
        weight,
        scales,
        grad,
        grad_total,
        grad_x,
        grad_weights,
        rows,
        width,
        has_residual: tl.constexpr,
        block: tl.constexpr,
    ):
        """Compute the gradients of the input and, partially summed, of the weight.

        Each program sums the weight's gradient over many rows, so that few partial sums are left to add up.
        """
        program = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, block)
        inside = at < width
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        summed = tl.zeros((block,), dtype=tl.float32)
        for row in range(program, rows, tl.num_programs(0)):
            offset = row * width + at
            value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(scales + row)
            normed = value * scale
            summed += up * normed
            weighted = up * w
            slope = (weighted - normed * (tl.sum(weighted * normed, 0) / width)) * scale
            if has_residual:
                slope += tl.load(grad_total + offset, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_x + offset, slope.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_weights + program * width + at, summed, mask=inside)


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    total = None if residual is None else x + residual
    return total, x.clone(), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@on_fake_tensors(_forward_fake)
def forward_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return `x + residual` (None without a residual), its norm, and the factor that each row was scaled by, fp32."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    out, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with on_device_of(x):
        _forward_kernel[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            x if total is None else total,
            out,
            scales,
            width,
            eps,
            has_residual=residual is not None,
            block=block,
            num_warps=_warps(block),
        )
    return total, out, scales


def _backward_fake(
    x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x * grad, torch.empty_like(weight)


@on_fake_tensors(_backward_fake)
def backward_triton(
    x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the norm's input, to which `grad_total` is added if given, and of the weight, fp32."""
    rows, width = len(scales), x.shape[-1]
    grad_x = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    programs = min(rows, _PROGRAMS * max(1, 2048 // block))
    grad_weights = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            x,
            weight,
            scales,
            grad,
            grad if grad_total is None else grad_total,
            grad_x,
            grad_weights,
            rows,
            width,
            has_residual=grad_total is not None,
            block=block,
            num_warps=_warps(block),
        )
    return grad_x, grad_weights.sum(0)


def _warps(block: int) -> int:
    return 16 if block >= 8192 else 8 if block >= 2048 else 4 if block >= 512 else 1


MAX_WIDTH = 32768
"""The largest width that the kernels support: a program holds a whole row."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` divided by the root of its mean square along the last dim, times `weight`, in the dtype of `x`."""
    if not _is_fused(x):
        return rms_norm_plain(x, weight, eps)
    out: Tensor = _RMSNorm.apply(x, None, weight, eps, False)[1]  # type: ignore[no-untyped-call]
    return out


def rms_norm_and_input(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x` and its norm. The kernel of the norm's backward pass also adds the gradient of the returned `x`."""
    if not _is_fused(x):
        return x, rms_norm_plain(x, weight, eps)
    same, out = _RMSNorm.apply(x, None, weight, eps, True)  # type: ignore[no-untyped-call]
    return same, out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of two tensors of one dtype, and the norm of the sum."""
    if not _is_fused(x) or x.dtype != y.dtype:
        total = x + y
        return total, rms_norm_plain(total, weight, eps)
    total, out = _RMSNorm.apply(x, y, weight, eps, False)  # type: ignore[no-untyped-call]
    return total, out


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do `rms_norm` with torch operations: computed in fp32 or wider, rounded at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


def _is_fused(x: Tensor) -> bool:
    return implementation("rms_norm", x) == "plait" and 0 < x.shape[-1] <= MAX_WIDTH


class _RMSNorm(torch.autograd.Function):
    """The norm and, if `y` is given, the sum before it. Saves the norm's input, and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, returns_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        given, x = x, x.contiguous()
        y = None if y is None else y.contiguous()
        total, out, scales = forward_triton(x, y, weight, eps)
        ctx.save_for_backward(x if total is None else total, weight, scales)
        ctx.set_materialize_grads(False)
        ctx.adds = y is not None
        return given if returns_input else total, out

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, scales = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total if ctx.adds else None, None, None, None
        grad = grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x, grad_weight = backward_triton(x, weight, scales, grad, grad_total)
        return grad_x, grad_x if ctx.adds else None, grad_weight.to(weight.dtype), None, None
