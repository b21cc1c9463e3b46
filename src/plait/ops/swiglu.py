"""The middle of a gated feed-forward, silu(gate) * up: one pass each way, and nothing kept but the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops.triton import HAS_TRITON, has_kernels, on_device_of, without_values

_BLOCK = 1024

if HAS_TRITON:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _forward_kernel(gate, up, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _backward_kernel(gate, up, grad, grad_gate, grad_up, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(grad_up + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
        slope = d * u * s * (1.0 + g * (1.0 - s))
        tl.store(grad_gate + at, slope.to(grad_gate.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, of tensors of one shape and format."""
    if not has_kernels(gate) or gate.dtype != up.dtype or gate.dtype == torch.float64:
        return swiglu_plain(gate, up)
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """The plain twin."""
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        if without_values(gate):
            return gate * up
        out = torch.empty_like(gate)
        with on_device_of(gate):
            _forward_kernel[(_programs(gate),)](gate, up, out, gate.numel(), block=_BLOCK, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        if without_values(gate):
            return grad * up, grad * gate
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        with on_device_of(gate):
            _backward_kernel[(_programs(gate),)](
                gate, up, grad, grad_gate, grad_up, gate.numel(), block=_BLOCK, num_warps=4
            )
        return grad_gate, grad_up


def _programs(x: Tensor) -> int:
    return max(1, -(-x.numel() // _BLOCK))
