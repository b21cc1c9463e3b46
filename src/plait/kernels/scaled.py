"""A tensor times a number that lies on the device, in another format: read once and written once.

torch's own product into another format casts element by element, at a third of the memory's speed. It is an operator,
so that a compiled backward pass can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.kernels.triton import HAS_TRITON, has_kernels, on_device_of

_BLOCK = 4096

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(x, factor, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def scaled_plain(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain twin."""
    if x.dtype == torch.float32 and dtype != torch.float32:
        # Rounded while it is written: a wide product would be as large again.
        return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
    return (x.float() * factor).to(dtype)


def _scaled_fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype).copy_(x)


@on_fake_tensors(_scaled_fake)
def _scaled_triton(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    with on_device_of(x):
        _kernel[(max(1, -(-x.numel() // _BLOCK)),)](x, factor, out, x.numel(), block=_BLOCK, num_warps=8)
    return out


@torch.library.custom_op("plait::scaled", mutates_args=())
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * factor` in `dtype`, of 16- or 32-bit numbers; computed in fp32 and rounded once."""
    x = x.contiguous()
    if not has_kernels(x):
        return scaled_plain(x, factor, dtype)
    return _scaled_triton(x, factor, dtype)


@scaled.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
