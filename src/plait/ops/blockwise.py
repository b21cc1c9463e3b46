"""Tensors in 8 bits a number: codes into a table of levels, and one fp32 scale for each block.

[Note: blocks lie in rows] A block is 256 neighbours of one row, where a row is everything behind the first dim. Ranks
share parameters by rows, so a rank has whole blocks, whatever its share: the codes, and with them all numbers that
follow, do not depend on the number of ranks. (Tensor parallelism may cut rows; where a part of a row is no multiple of
256, blocks end there, and rounding differs.)

[Note: levels] The levels are dense where numbers are large and reach far down: seven decades for unsigned numbers, six
for signed ones, each decade with half as many levels as the one above it (Dettmers et al., 2022). The largest level is
1 on both sides, so the largest number of a block is kept exactly; hence packing what was unpacked gives the same codes
and scales again, and a checkpoint in fp32 loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
AT_ONCE = 1 << 18
"""Numbers that are turned from one form into the other at a time, where what that takes must not grow with them."""
PASSING = 16 * AT_ONCE
"""Bytes that it takes."""


class Levels(NamedTuple):
    """The numbers that codes stand for, sorted."""

    values: Tensor
    """256 levels."""
    bounds: Tensor
    """The middles between neighbours, infinity last: a number's code is how many of them are smaller."""
    first: Tensor
    """For the upper 16 bits of an fp32 number: the least code that numbers which begin so have. It is theirs, or the
    next: no two bounds are so near to each other."""
    zero: int
    """The code of zero."""
    least: int
    """The code that a number above zero has at least: a moment that vanished must not be divided by."""


def make_levels(device: torch.device, *, signed: bool) -> Levels:
    """The table for signed numbers in [-1, 1], or for unsigned ones in [0, 1]."""
    top = 6 if signed else 7
    positive: list[float] = []
    for decade in range(top, -1, -1):
        count = 2 ** (top - decade)
        positive += [10.0**-decade * (0.1 + 0.9 * (step + 1) / count) for step in range(count)]
    values = [*(-value for value in reversed(positive)), 0.0, *positive] if signed else [0.0, *positive]
    values += [float("inf")] * (256 - len(values))  # a code that nothing has
    exact = torch.tensor(values, dtype=torch.float64)
    bounds = torch.cat([(exact[1:] + exact[:-1]) / 2, exact.new_tensor([float("inf")])]).float()
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    ends = torch.stack([(upper << 16).view(torch.float32), (upper << 16 | 0xFFFF).view(torch.float32)])
    first = torch.bucketize(ends.nan_to_num_(0.0).amin(0), bounds, out_int32=True).clamp_(max=255)
    return Levels(exact.float().to(device), bounds.to(device), first.to(device), values.index(0.0), 0 if signed else 1)


class Packed(NamedTuple):
    """A tensor in 8 bits."""

    codes: Tensor
    """uint8, in the shape of the tensor."""
    scales: Tensor
    """fp32, (rows, blocks of a row): the largest magnitude in each block."""
    levels: Levels

    @property
    def nbytes(self) -> int:
        """What it takes up."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, begin: int, end: int) -> Packed:
        """Some of its rows, sharing its memory."""
        return Packed(self.codes[begin:end], self.scales[begin:end], self.levels)


def width_of(tensor: Tensor) -> int:
    """How many numbers a row has."""
    return 1 if tensor.ndim < 2 else tensor.shape[1:].numel()


def zeros(like: Tensor, levels: Levels) -> Packed:
    """A tensor of zeros, shaped like another."""
    codes = torch.full(like.shape, levels.zero, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(like.shape[0], -(-width_of(like) // BLOCK), device=like.device)
    return Packed(codes, scales, levels)


def pack_into(packed: Packed, tensor: Tensor) -> None:
    """Overwrite with the nearest levels of `tensor`."""
    codes, scales, levels = packed
    if tensor.numel() == 0:
        return
    rows, width = tensor.shape[0], width_of(tensor)
    blocks = _in_blocks(tensor.reshape(rows, width).float())
    torch.amax(blocks.abs(), -1, out=scales)
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    inverse = inverse.where(inverse.isfinite(), 0.0)  # of a subnormal scale: a block that is zero to all purposes
    found = _nearest((blocks * inverse[..., None]).view(-1), levels)
    if levels.least:
        found.clamp_(min=levels.least).mul_(blocks.view(-1) > 0)
    codes.copy_(found.view(rows, -1)[:, :width].view(codes.shape))


def unpack(packed: Packed) -> Tensor:
    """The fp32 tensor that the codes stand for."""
    codes, scales, levels = packed
    rows, width = codes.shape[0], width_of(codes)
    if codes.numel() == 0:
        return torch.empty(codes.shape, device=codes.device)
    values = levels.values.index_select(0, codes.reshape(-1).int()).view(rows, width)
    return (_in_blocks(values) * scales[..., None]).view(rows, -1)[:, :width].reshape(codes.shape).contiguous()


def unpack_on_host(packed: Packed, begin: int = 0, end: int | None = None) -> Tensor:
    """`unpack` of some rows in host memory; on the way it takes `PASSING` bytes more, there or on the device."""
    packed = packed.rows(begin, len(packed.codes) if end is None else end)
    room = torch.empty(packed.codes.shape, dtype=torch.float32)
    for rows in _rows_at_once(packed):
        room[rows].copy_(unpack(packed.rows(rows.start, rows.stop)))
    return room


def pack_from_host(packed: Packed, begin: int, tensor: Tensor) -> None:
    """`pack_into` of rows from `begin` on, from host memory, with as little more."""
    packed = packed.rows(begin, begin + len(tensor))
    for rows in _rows_at_once(packed):
        pack_into(packed.rows(rows.start, rows.stop), tensor[rows].to(packed.codes.device))


def _rows_at_once(packed: Packed) -> Iterator[slice]:
    rows, step = len(packed.codes), max(1, AT_ONCE // max(1, width_of(packed.codes)))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _nearest(numbers: Tensor, levels: Levels) -> Tensor:
    """What `torch.bucketize` finds, in two look-ups rather than eight."""
    found = levels.first.index_select(0, (numbers.view(torch.int32) >> 16).add_(2**15))
    return found.add_(levels.bounds.index_select(0, found) < numbers)


def _in_blocks(flat: Tensor) -> Tensor:
    rows, width = flat.shape
    if width % BLOCK:
        flat = F.pad(flat, (0, -width % BLOCK))
    return flat.view(rows, -1, BLOCK)
