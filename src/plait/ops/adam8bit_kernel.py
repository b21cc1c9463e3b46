"""The Triton twin of `adam8bit`: a block's moments are widened, moved and packed again without leaving the chip.

On tensors without values nothing is launched, so that a plan sees the memory that the kernel takes: none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.ops.adam import AdamNumbers
from plait.ops.blockwise import BLOCK, Packed, width_of
from plait.ops.triton import HAS_TRITON, has_kernels

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _pack(x, inside, codes, scales, bounds, at, block_at, least: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the nearest codes of one block, and its scale."""
        scale = tl.max(tl.where(inside, tl.abs(x), 0.0), 0)
        inverse = 1.0 / scale
        # No inverse where the block is zero, or so small that it might as well be.
        relative = tl.where((scale > 0) & (inverse < float("inf")), x * inverse, 0.0)
        code = tl.zeros_like(at).to(tl.int32)
        for bit in tl.static_range(8):
            probe = code + (128 >> bit)
            code = tl.where(tl.load(bounds + probe - 1) < relative, probe, code)
        if least > 0:
            code = tl.where(x > 0, tl.maximum(code, least), 0)
        tl.store(codes + at, code.to(tl.uint8), mask=inside)
        tl.store(scales + block_at, scale)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        weight,
        grad,
        mean_codes,
        mean_scales,
        mean_levels,
        mean_bounds,
        square_codes,
        square_scales,
        square_levels,
        square_bounds,
        width,
        blocks,
        scale,
        kept,
        decay,
        gain1,
        beta2,
        gain2,
        correction,
        eps,
        rate,
        block: tl.constexpr,
    ):
        """One program a block."""
        block_at = tl.program_id(0).to(tl.int64)
        row = block_at // blocks
        column = (block_at % blocks) * block + tl.arange(0, block)
        inside = column < width
        at = row * width + column
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
        m_code = tl.load(mean_codes + at, mask=inside, other=0).to(tl.int32)
        v_code = tl.load(square_codes + at, mask=inside, other=0).to(tl.int32)
        m = tl.load(mean_levels + m_code) * tl.load(mean_scales + block_at)
        v = tl.load(square_levels + v_code) * tl.load(square_scales + block_at)
        g += w * decay
        m += (g - m) * gain1
        v = v * beta2 + g * g * gain2
        w = w * kept - rate * m / (tl.sqrt(v / correction) + eps)
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
        m = tl.where(inside, m, 0.0)
        v = tl.where(inside, v, 0.0)
        _pack(m, inside, mean_codes, mean_scales, mean_bounds, at, block_at, 0)
        _pack(v, inside, square_codes, square_scales, square_bounds, at, block_at, 1)


def is_fused(tensor: Tensor) -> bool:
    """Whether the kernel is for such tensors."""
    return tensor.is_cuda and has_kernels(tensor)


def _nothing(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    pass


@on_fake_tensors(_nothing, argument=1)
def adam8bit_step_triton(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """The twin of `adam8bit_step_plain`."""
    assert weight.is_contiguous(), "tensors are contiguous"
    blocks = mean.scales.shape[1]
    beta1, beta2 = numbers.betas
    decay = numbers.weight_decay
    # What is close to 1 is worked out here: the kernel gets its numbers in fp32.
    with torch.cuda.device(weight.device):
        _kernel[(weight.shape[0] * blocks,)](
            weight,
            grad.contiguous(),
            mean.codes,
            mean.scales,
            mean.levels.values,
            mean.levels.bounds,
            square.codes,
            square.scales,
            square.levels.values,
            square.levels.bounds,
            width_of(weight),
            blocks,
            numbers.scale,
            1.0 - numbers.lr * decay if numbers.decoupled else 1.0,
            0.0 if numbers.decoupled else decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            1.0 - beta2**numbers.step,
            numbers.eps,
            numbers.lr / (1.0 - beta1**numbers.step),
            block=BLOCK,
            num_warps=2,
        )
