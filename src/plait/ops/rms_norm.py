"""RMSNorm, alone or of a sum, in one pass over memory each way; in torch's own operations where there is no kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops.rms_norm_kernel import backward_triton, forward_triton
from plait.ops.triton import has_kernels

MAX_WIDTH = 32768
"""A program holds a whole row."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` divided by the root of its mean square along the last dim, times `weight`; in the format of `x`."""
    if not _is_fused(x):
        return rms_norm_plain(x, weight, eps)
    out: Tensor = _Norm.apply(x, None, weight, eps, False)[1]  # type: ignore[no-untyped-call]
    return out


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` as it is, and its norm. Who goes on with this `x` has its gradient added where the norm's is made."""
    if not _is_fused(x):
        return x, rms_norm_plain(x, weight, eps)
    same, out = _Norm.apply(x, None, weight, eps, True)  # type: ignore[no-untyped-call]
    return same, out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two tensors of one format, and its norm."""
    if not _is_fused(x) or x.dtype != y.dtype:
        total = x + y
        return total, rms_norm_plain(total, weight, eps)
    total, out = _Norm.apply(x, y, weight, eps, False)  # type: ignore[no-untyped-call]
    return total, out


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain twin: computed in fp32 or wider, rounded at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


def _is_fused(x: Tensor) -> bool:
    return has_kernels(x) and 0 < x.shape[-1] <= MAX_WIDTH and x.dtype != torch.float64


class _Norm(torch.autograd.Function):
    """Keeps what was normed, and one number a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, beside: bool
    ) -> tuple[Tensor | None, Tensor]:
        given, x = x, x.contiguous()
        y = None if y is None else y.contiguous()
        total, out, scales = forward_triton(x, y, weight, eps)
        ctx.save_for_backward(x if total is None else total, weight, scales)
        ctx.set_materialize_grads(False)
        ctx.adds = y is not None
        return given if beside else total, out

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
