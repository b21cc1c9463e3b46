"""One step of AdamW with 8-bit moments: one kernel on CUDA, piece by piece elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels.adam import AdamNumbers, adam_step, adam_step_plain
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON

# Blockwise 8-bit quantization: codes into a table of levels, and one fp32 scale per block.
#
# [Note: blocks lie in rows] A block is 256 neighbours of one row, where a row is everything behind the first dim. FSDP
# shards parameters by rows, so a rank has whole blocks: the codes, and with them all numbers that follow, do not depend
# on the number of ranks. (Tensor parallelism may cut rows; where the shard of a row is not a multiple of 256, blocks
# end there, and rounding differs.)
#
# [Note: levels] The levels are dense where numbers are large and reach far down: seven decades for unsigned numbers,
# six for signed ones, each decade with half as many levels as the one above it (Dettmers et al., 2022). The largest
# level is 1 on both sides, so the largest number of a block is kept exactly; hence packing what was unpacked gives the
# same codes and scales again, and a checkpoint in fp32 loses nothing.


BLOCK = 256
CHUNK_NUMBERS = 1 << 18
"""Elements that are packed or unpacked at a time where the temporary memory must not grow with the tensor."""
WORKSPACE_BYTES = 16 * CHUNK_NUMBERS
"""The temporary memory that this takes."""


class Levels(NamedTuple):
    """The numbers that codes stand for, sorted."""

    values: Tensor
    """256 levels."""
    bounds: Tensor
    """The midpoints between neighbours, infinity last: a number's code is the count of smaller bounds."""
    first: Tensor
    """For each value of an fp32 number's upper 16 bits, the lowest code of such numbers. A number has this code or the
    next one: no two bounds share their upper 16 bits."""
    zero: int
    """The code of zero."""
    least: int
    """The lowest code of a positive number: a second moment that is not zero must not become zero."""


def make_levels(device: torch.device, *, signed: bool) -> Levels:
    """Return the table for signed numbers in [-1, 1], or for unsigned numbers in [0, 1]."""
    top = 6 if signed else 7
    positive: list[float] = []
    for decade in range(top, -1, -1):
        count = 2 ** (top - decade)
        positive += [10.0**-decade * (0.1 + 0.9 * (step + 1) / count) for step in range(count)]
    values = [*(-value for value in reversed(positive)), 0.0, *positive] if signed else [0.0, *positive]
    values += [float("inf")] * (256 - len(values))  # codes that are not used
    exact = torch.tensor(values, dtype=torch.float64)
    bounds = torch.cat([(exact[1:] + exact[:-1]) / 2, exact.new_tensor([float("inf")])]).float()
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    edges = torch.stack([(upper << 16).view(torch.float32), (upper << 16 | 0xFFFF).view(torch.float32)])
    first = torch.bucketize(edges.nan_to_num_(0.0).amin(0), bounds, out_int32=True).clamp_(max=255)
    return Levels(exact.float().to(device), bounds.to(device), first.to(device), values.index(0.0), 0 if signed else 1)


class Packed(NamedTuple):
    """A tensor quantized to 8 bits."""

    codes: Tensor
    """uint8, in the shape of the tensor."""
    scales: Tensor
    """fp32, (rows, blocks per row): the largest magnitude in each block."""
    levels: Levels

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, begin: int, end: int) -> Packed:
        """A view of some rows."""
        return Packed(self.codes[begin:end], self.scales[begin:end], self.levels)


def width_of(tensor: Tensor) -> int:
    """Elements per row."""
    return 1 if tensor.ndim < 2 else tensor.shape[1:].numel()


def zeros(like: Tensor, levels: Levels) -> Packed:
    """Return packed zeros in the shape of another tensor."""
    codes = torch.full(like.shape, levels.zero, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(like.shape[0], -(-width_of(like) // BLOCK), device=like.device)
    return Packed(codes, scales, levels)


def pack_into(packed: Packed, tensor: Tensor) -> None:
    """Overwrite `packed` with the nearest levels of `tensor`."""
    codes, scales, levels = packed
    if tensor.numel() == 0:
        return
    rows, width = tensor.shape[0], width_of(tensor)
    blocks = _in_blocks(tensor.reshape(rows, width).float())
    torch.amax(blocks.abs(), -1, out=scales)
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    inverse = inverse.where(inverse.isfinite(), 0.0)  # a subnormal scale: the block counts as zero
    nearest = _nearest((blocks * inverse[..., None]).view(-1), levels)
    if levels.least:
        nearest.clamp_(min=levels.least).mul_(blocks.view(-1) > 0)
    codes.copy_(nearest.view(rows, -1)[:, :width].view(codes.shape))


def unpack(packed: Packed) -> Tensor:
    """Return the fp32 tensor that the codes stand for."""
    codes, scales, levels = packed
    rows, width = codes.shape[0], width_of(codes)
    if codes.numel() == 0:
        return torch.empty(codes.shape, device=codes.device)
    values = levels.values.index_select(0, codes.reshape(-1).int()).view(rows, width)
    return (_in_blocks(values) * scales[..., None]).view(rows, -1)[:, :width].reshape(codes.shape).contiguous()


def unpack_on_host(packed: Packed, begin: int = 0, end: int | None = None) -> Tensor:
    """`unpack` some rows into host memory, with `WORKSPACE_BYTES` of temporary memory on the device."""
    packed = packed.rows(begin, len(packed.codes) if end is None else end)
    out = torch.empty(packed.codes.shape, dtype=torch.float32)
    for rows in _rows_at_once(packed):
        out[rows].copy_(unpack(packed.rows(rows.start, rows.stop)))
    return out


def pack_from_host(packed: Packed, begin: int, tensor: Tensor) -> None:
    """`pack_into` rows from `begin` on, from host memory, with as little temporary memory."""
    packed = packed.rows(begin, begin + len(tensor))
    for rows in _rows_at_once(packed):
        pack_into(packed.rows(rows.start, rows.stop), tensor[rows].to(packed.codes.device))


def _rows_at_once(packed: Packed) -> Iterator[slice]:
    rows, step = len(packed.codes), max(1, CHUNK_NUMBERS // max(1, width_of(packed.codes)))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _nearest(numbers: Tensor, levels: Levels) -> Tensor:
    """Return what `torch.bucketize` would, with two look-ups rather than eight."""
    codes = levels.first.index_select(0, (numbers.view(torch.int32) >> 16).add_(2**15))
    return codes.add_(levels.bounds.index_select(0, codes) < numbers)


def _in_blocks(flat: Tensor) -> Tensor:
    rows, width = flat.shape
    if width % BLOCK:
        flat = F.pad(flat, (0, -width % BLOCK))
    return flat.view(rows, -1, BLOCK)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _pack(x, inside, codes, scales, bounds, at, block_at, least: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the nearest codes of one block, and its scale."""
        scale = tl.max(tl.where(inside, tl.abs(x), 0.0), 0)
        inverse = 1.0 / scale
        # A block of zeros, or with a subnormal scale, has no inverse.
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
        """One program per block: its moments are unpacked, updated and packed without a pass through memory."""
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
    """Whether the kernel supports this tensor."""
    return tensor.is_cuda and implementation("adam8bit", tensor) == "plait"


def _nothing(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    pass


@on_fake_tensors(_nothing, argument=1)
def adam8bit_step_triton(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """`adam8bit_step_plain` in one kernel; on fake tensors a plan sees the memory that it takes: none."""
    assert weight.is_contiguous(), "tensors are contiguous"
    blocks = mean.scales.shape[1]
    beta1, beta2 = numbers.betas
    decay = numbers.weight_decay
    # Numbers close to 1 are computed here in float64: the kernel gets its arguments in fp32.
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


_PIECE = 1 << 18
"""Elements whose moments are unpacked at a time on the CPU: they stay in the cache."""
_DEVICE_PIECE = 1 << 24
"""The same on other devices, which need many elements to be busy."""


def adam8bit_step(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """Update a weight of any floating-point dtype and its packed moments in place."""
    if weight.numel() == 0:
        return
    if is_fused(weight):
        adam8bit_step_triton(numbers, weight, grad, mean, square)
    else:
        adam8bit_step_plain(numbers, weight, grad, mean, square)


@torch.no_grad()
def adam8bit_step_plain(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """Unpack, step, pack, in torch operations. The temporary memory does not grow with the tensor."""
    on_host = weight.device.type == "cpu"
    step = adam_step if on_host else adam_step_plain
    rows = max(1, (_PIECE if on_host else _DEVICE_PIECE) // width_of(weight))
    for begin in range(0, weight.shape[0], rows):
        piece = slice(begin, begin + rows)
        wide = weight[piece].float()  # the weight itself where it is fp32
        wide_mean, wide_square = unpack(mean.rows(begin, begin + rows)), unpack(square.rows(begin, begin + rows))
        step(numbers, [wide], [grad[piece].contiguous()], [wide_mean], [wide_square])
        if weight.dtype != torch.float32:
            weight[piece].copy_(wide)
        pack_into(mean.rows(begin, begin + rows), wide_mean)
        pack_into(square.rows(begin, begin + rows), wide_square)
