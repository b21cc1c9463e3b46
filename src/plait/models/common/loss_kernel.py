"""The Triton twins of what the chunked losses do with logits: one pass for the sum, one to overwrite the logits.

Where a rank has a part of the vocabulary, the ranks exchange the rows' sums in between, so the passes are two kernels.
On tensors without values nothing is launched, so that a plan sees the memory that the kernels take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.models.common.protocol import IGNORE_INDEX
from plait.ops import HAS_TRITON, has_kernels

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(logits, labels, losses, columns, stride, ignored: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        label = tl.load(labels + row)
        counted = label != ignored
        label = tl.where(counted, label, 0)
        target = tl.load(logits + label).to(tl.float32)

        # The running sum is kept relative to the running maximum, so that nothing overflows.
        maximum = float("-inf")
        total = 0.0
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(x, 0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), 0)
            maximum = larger
        log_total = maximum + tl.log(total)
        tl.store(losses + row, tl.where(counted, log_total - target, 0.0))
        tl.debug_barrier()  # the target has been read by all before it is overwritten

        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - log_total) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < columns)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _statistics_kernel(logits, places, maxima, sums, targets, columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        place = tl.maximum(tl.load(places + row), 0)
        tl.store(targets + row, tl.load(logits + place).to(tl.float32))
        maximum = float("-inf")
        total = 0.0
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(x, 0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), 0)
            maximum = larger
        tl.store(maxima + row, maximum)
        tl.store(sums + row, total)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _slopes_kernel(logits, places, log_totals, columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        place = tl.load(places + row)
        log_total = tl.load(log_totals + row)
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            slope = tl.exp(x - log_total) - tl.where(at == place, 1.0, 0.0)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < columns)


def is_fused(logits: Tensor) -> bool:
    """Whether these kernels are for such logits."""
    return logits.is_cuda and has_kernels(logits)


def _loss_and_slopes_fake(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits


@on_fake_tensors(_loss_and_slopes_fake)
def loss_and_slopes_triton(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, and its gradient in the place of the logits (rows, columns)."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _kernel[(rows,)](
            logits, labels, losses, columns, logits.stride(0), ignored=IGNORE_INDEX, block=block, num_warps=16
        )
    return losses, logits


def _row_statistics_fake(logits: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = logits.new_empty(3, len(logits), dtype=torch.float32)
    return found[0], found[1], found[2]


@on_fake_tensors(_row_statistics_fake)
def row_statistics_triton(logits: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of `split_loss.row_statistics`."""
    rows, columns = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _statistics_kernel[(rows,)](
            logits, place, found[0], found[1], found[2], columns, logits.stride(0), block=block, num_warps=16
        )
    return found[0], found[1], found[2]


def _slopes_fake(logits: Tensor, place: Tensor, log_total: Tensor) -> Tensor:
    return logits


@on_fake_tensors(_slopes_fake)
def slopes_triton(logits: Tensor, place: Tensor, log_total: Tensor) -> Tensor:
    """The twin of `split_loss.slopes_of`; overwrites the logits."""
    rows, columns = logits.shape
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _slopes_kernel[(rows,)](logits, place, log_total, columns, logits.stride(0), block=block, num_warps=16)
    return logits


def _block(columns: int) -> int:
    return min(8192, int(triton.next_power_of_2(columns)))
