"""silu(gate) * up: one kernel for the forward pass, one for the backward pass, which recomputes it from its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, on_device_of

_BLOCK = 1024

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _forward_kernel(gate, up, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _backward_kernel(  # type: ignore[no-untyped-def]
        gate, up, grad, grad_gate, grad_up, out, count, has_out: tl.constexpr, block: tl.constexpr
    ):
        """Store the gradients of gate and up and, with `has_out`, silu(gate) * up into `out`.

        `out` may be the same tensor as `grad`: a program loads all its elements before it stores any.
        """
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(grad_up + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
        slope = d * u * s * (1.0 + g * (1.0 - s))
        tl.store(grad_gate + at, slope.to(grad_gate.dtype.element_ty), mask=inside)
        if has_out:
            tl.store(out + at, (g * s * u).to(out.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for tensors of one shape and dtype."""
    if not _is_fused(gate, up):
        return swiglu_plain(gate, up)
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """Return what `swiglu` returns, by torch operations."""
    return F.silu(gate) * up


def _is_fused(gate: Tensor, up: Tensor) -> bool:
    return implementation("swiglu", gate) == "plait" and gate.dtype == up.dtype


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return product_of(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up, _ = slopes_of(gate, up, grad.contiguous())
        return grad_gate, grad_up


def product_of(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for contiguous tensors, without autograd."""
    if not _is_fused(gate, up):
        return swiglu_plain(gate, up)
    return _product_triton(gate, up)


def _product_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate * up


@on_fake_tensors(_product_fake)
def _product_triton(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    with on_device_of(gate):
        _forward_kernel[(_programs(gate),)](gate, up, out, gate.numel(), block=_BLOCK, num_warps=4)
    return out


def slopes_of(gate: Tensor, up: Tensor, grad: Tensor, *, again: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate and up and, with `again`, `silu(gate) * up` (else None), for contiguous tensors.

    `grad` is the gradient of `silu(gate) * up`; with `again`, the result may be stored in its memory.
    """
    if not _is_fused(gate, up):
        return slopes_plain(gate, up, grad, again=again)
    return _slopes_triton(gate, up, grad, again)


def _slopes_fake(gate: Tensor, up: Tensor, grad: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    return grad * gate, up.clone(), grad.zero_() if again else None


@on_fake_tensors(_slopes_fake)
def _slopes_triton(gate: Tensor, up: Tensor, grad: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    with on_device_of(gate):
        _backward_kernel[(_programs(gate),)](
            gate, up, grad, grad_gate, grad_up, grad, gate.numel(), has_out=again, block=_BLOCK, num_warps=4
        )
    return grad_gate, grad_up, grad if again else None


def slopes_plain(
    gate: Tensor, up: Tensor, grad: Tensor, *, again: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `slopes_of` returns, by torch operations: computed in fp32 or wider, and rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), grad.to(wide)
    s = g.sigmoid()
    grad_gate, grad_up = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype), (g * s * u).to(gate.dtype) if again else None


def _programs(x: Tensor) -> int:
    return max(1, -(-x.numel() // _BLOCK))
