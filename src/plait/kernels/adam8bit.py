"""One step of AdamW with 8-bit moments: a single kernel on CUDA; elsewhere torch operations, one piece at a time."""

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

# Blockwise 8-bit quantization: a number is stored as a code, the index of a level in a table of 256; the levels of a
# block are multiplied with the block's fp32 scale. *Packing* converts a tensor to codes and scales, *unpacking* back.
#
# [Note: blocks lie in rows] A block is 256 consecutive elements of one row; a row is one index of the first dim, with
# all other dims flattened. FSDP shards parameters along the first dim, so a rank has whole blocks: neither codes nor
# what is computed from them depends on the number of ranks. (Tensor parallelism may split rows; where a rank's part of
# a row is not a multiple of 256, a block ends there, and rounding differs.)
#
# [Note: levels] The levels cover many orders of magnitude, with more levels among large numbers: the smallest is 1e-7
# for unsigned numbers and 1e-6 for signed ones, and each decade has half as many levels as the next larger one
# (Dettmers et al., 2022). The largest level is 1 (and -1), so the number with the largest magnitude in a block is
# stored exactly. Hence packing an unpacked tensor gives the same codes and scales, and a checkpoint in fp32 loses
# nothing.


BLOCK = 256
CHUNK_NUMBERS = 1 << 18
"""Elements that are packed or unpacked at a time to or from the host, so that temporary memory is bounded."""
WORKSPACE_BYTES = 16 * CHUNK_NUMBERS
"""The temporary memory, in bytes, for packing or unpacking that many elements."""


class Levels(NamedTuple):
    """The numbers that codes stand for, sorted."""

    values: Tensor
    """256 levels."""
    bounds: Tensor
    """The midpoints between neighbouring levels, and infinity: a number's code is the count of bounds below it."""
    first: Tensor
    """For each value of the upper 16 bits of an fp32 number, the lowest code of a number with these bits. A number has
    this code or the next one, because no two bounds have the same upper 16 bits."""
    zero: int
    """The code of zero."""
    least: int
    """The lowest code that a positive number may get. 1 for unsigned numbers: a second moment that is not zero must not
    be rounded to zero."""


def make_levels(device: torch.device, *, signed: bool) -> Levels:
    """Return the table of levels for signed numbers in [-1, 1], or for unsigned numbers in [0, 1]."""
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
        """The size of codes and scales in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, begin: int, end: int) -> Packed:
        """Return a view of the rows from `begin` up to `end`."""
        return Packed(self.codes[begin:end], self.scales[begin:end], self.levels)


def width_of(tensor: Tensor) -> int:
    """Return the number of elements per row; see [Note: blocks lie in rows]."""
    return 1 if tensor.ndim < 2 else tensor.shape[1:].numel()


def zeros(like: Tensor, levels: Levels) -> Packed:
    """Return packed zeros in the shape of another tensor."""
    codes = torch.full(like.shape, levels.zero, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(like.shape[0], -(-width_of(like) // BLOCK), device=like.device)
    return Packed(codes, scales, levels)


def pack_into(packed: Packed, tensor: Tensor) -> None:
    """Pack `tensor` into `packed`: each element is rounded to the nearest level of its block."""
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
    """Unpack the rows from `begin` up to `end`, and return them as fp32 in host memory.

    Takes `WORKSPACE_BYTES` of temporary memory on the device.
    """
    packed = packed.rows(begin, len(packed.codes) if end is None else end)
    out = torch.empty(packed.codes.shape, dtype=torch.float32)
    for rows in _rows_at_once(packed):
        out[rows].copy_(unpack(packed.rows(rows.start, rows.stop)))
    return out


def pack_from_host(packed: Packed, begin: int, tensor: Tensor) -> None:
    """Pack `tensor`, in host memory, into the rows from `begin` on, with `WORKSPACE_BYTES` of temporary memory."""
    packed = packed.rows(begin, begin + len(tensor))
    for rows in _rows_at_once(packed):
        pack_into(packed.rows(rows.start, rows.stop), tensor[rows].to(packed.codes.device))


def _rows_at_once(packed: Packed) -> Iterator[slice]:
    rows, step = len(packed.codes), max(1, CHUNK_NUMBERS // max(1, width_of(packed.codes)))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _nearest(numbers: Tensor, levels: Levels) -> Tensor:
    """Return the codes of fp32 numbers, as `torch.bucketize` would: two look-ups instead of a search of eight steps."""
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
        """Pack the numbers `x` of one block: store their codes and the block's scale."""
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
        """Update one block per program: unpack its moments, update them and the weights, and pack the moments again.

        The unpacked moments are never stored in memory.
        """
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
    """Whether the Triton kernel updates this tensor."""
    return tensor.is_cuda and implementation("adam8bit", tensor) == "plait"


def _nothing(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    pass


@on_fake_tensors(_nothing, argument=1)
def adam8bit_step_triton(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """Do the update of `adam8bit_step_plain` in one kernel, which takes no temporary memory.

    With fake tensors, nothing is done.
    """
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
"""Elements whose moments are unpacked at a time on the CPU: few enough to stay in the cache."""
_DEVICE_PIECE = 1 << 24
"""The same on other devices, which need more elements to be busy."""


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
    """Do the update of `adam8bit_step` with torch operations: unpack some rows of the moments, update, pack again.

    Temporary memory is bounded by the number of rows that are updated at a time, whatever the size of the tensor.
    """
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
