"""Tensors in 8 bits: their scale, and copies that lie row by row and column by column.

[Note: copies for three products] A product takes both of its matrices along the dimension that is summed over. Each
tensor takes part in two of the three products of a linear layer, and another dimension is summed over in each, so it is
wanted as it is and turned over. Both copies are made in one reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.ops.fp8_kernel import cast_triton, peaks_triton
from plait.ops.triton import has_kernels

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""What both sides of a matrix must be a multiple of."""
SMALLEST = 1e-12
"""A tensor of zeros has no scale; a smaller number than this counts as zero."""


class Cast(NamedTuple):
    """A matrix in 8 bits."""

    rows: Tensor
    """As it is; without elements where it was not asked for."""
    columns: Tensor
    """Turned over, with zeros at the end of each row up to a multiple of 16; empty where it was not asked for."""
    inverse: Tensor
    """What the numbers are to be multiplied by, fp32."""


def is_fused(x: Tensor) -> bool:
    """Whether there is a kernel for such a tensor; Triton rounds to these formats where the device does."""
    return has_kernels(x, (8, 9))


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What a tensor is multiplied by to fill the range of `dtype`, fp32; one for each slice along `dim`."""
    return _scale(torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None).float(), dtype)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scaled tensor in 8 bits, row by row. Rounding may not lead out of the range: there is only NaN."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


def peaks_of(tensors: Sequence[Tensor]) -> Tensor:
    """Numbers the largest of which is the largest absolute value in these tensors; NaN where one is in them."""
    if is_fused(tensors[0]):
        return peaks_triton([x.contiguous() for x in tensors])
    return peaks_plain(tensors)


def peaks_plain(tensors: Sequence[Tensor]) -> Tensor:
    """The plain twin of `peaks_of`."""
    return torch.stack([torch.linalg.vector_norm(x, float("inf")) for x in tensors]).float()


def cast(
    tensors: Sequence[Tensor],
    peaks: Tensor,
    dtype: torch.dtype,
    *,
    dim: int = 0,
    rows: bool,
    columns: bool,
    notes: Tensor | None = None,
    saturates: bool = False,
) -> Cast:
    """These matrices, put together along `dim`, in 8 bits with one scale; `peaks` are from `peaks_of`.

    `saturates`: peaks of other tensors, and numbers beyond them are cut. `notes`, int32, are the bits of numbers that
    are raised to the largest of these: one for each matrix, or all for the only one.
    """
    if not is_fused(tensors[0]):
        return cast_plain(tensors, peaks, dtype, dim=dim, rows=rows, columns=columns, notes=notes, saturates=saturates)
    sizes = [x.shape[dim] for x in tensors]
    other, total = tensors[0].shape[1 - dim], sum(sizes)
    height, width = (other, total) if dim else (total, other)
    by_row = tensors[0].new_empty((height, width) if rows else 0, dtype=dtype)
    by_column = tensors[0].new_empty((width, height + -height % MULTIPLE) if columns else 0, dtype=dtype)
    inverse = peaks.new_empty(())
    noted: Sequence[Tensor | None] = [None] * len(tensors) if notes is None else notes.chunk(len(tensors))
    start = 0
    for x, size, places in zip(tensors, sizes, noted, strict=True):
        # Only one matrix alone, or several side by side, may be in need of padding.
        room = size if len(tensors) > 1 or dim else by_column.shape[-1]
        row_part = by_row.narrow(dim, start, size) if rows else None
        column_part = by_column.narrow(1 - dim, start, room) if columns else None
        start += size
        cast_triton(x.contiguous(), peaks, row_part, column_part, inverse, SMALLEST, notes=places, saturates=saturates)
    return Cast(by_row, by_column, inverse)


def cast_plain(
    tensors: Sequence[Tensor],
    peaks: Tensor,
    dtype: torch.dtype,
    *,
    dim: int = 0,
    rows: bool,
    columns: bool,
    notes: Tensor | None = None,
    saturates: bool = False,
) -> Cast:
    """The plain twin of `cast`."""
    if notes is not None:
        note_plain(tensors, notes)
    scale = _scale(peaks.amax(), dtype)
    whole = torch.cat(tuple(tensors), dim)
    if saturates:  # what is not finite must not be cut to something that is
        whole = whole.where(whole.isfinite(), torch.nan)
    small = rounded(whole, scale, dtype)
    none = small.new_empty(0)
    # Bytes, because not every operation knows these formats.
    turned = F.pad(small.view(torch.uint8).t(), (0, -len(small) % MULTIPLE)).contiguous().view(dtype)
    return Cast(small if rows else none, turned if columns else none, scale.reciprocal())


def note_plain(tensors: Sequence[Tensor], notes: Tensor) -> None:
    """Raise notes, the bits of numbers, to the largest absolute value of each tensor, or of the only one."""
    seen = notes.view(torch.float32)
    seen.copy_(torch.maximum(seen, peaks_plain(tensors)))


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=SMALLEST).reciprocal() * torch.finfo(dtype).max
