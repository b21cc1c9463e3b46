"""The Triton twins of what the chunked losses do with logits: one pass for the sum, one to overwrite the logits.

Where a rank has a part of the vocabulary, the ranks exchange the rows' sums in between, so the passes are two kernels.
On tensors without values nothing is launched, so that a plan sees the memory that the kernels take.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels import HAS_TRITON, has_fp8_kernels, has_kernels, interprets, on_device_of
from plait.models.common.protocol import IGNORE_INDEX

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


def is_loss_fused(logits: Tensor) -> bool:
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


# What the model thinks of all words but the right one, in 8 bits: the Triton form and its plain twin.
#
# It is written as it lies and turned over; see [Note: turned over in words] in `ops.fp8_kernel`. The logits are read
# once for both, and nothing is written in 16 bits. Other numbers that are rounded have no known bound; probabilities
# have, so their scale is fixed: nobody looks for the largest.


SCALE = 2.0**15
"""What probabilities are multiplied by: one becomes 32,768, of at most 57,344. The smallest that is left is 2**-31."""
_TALL, _WIDE = 128, 64
"""Rows and columns of a tile, as for other casts: lines of the cache, both ways."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels import pack_pair, store_transposed

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _fp8_slopes_kernel(  # type: ignore[no-untyped-def]
        logits,
        labels,
        log_totals,
        rows,
        columns,
        height,
        width,
        padded_height,
        padded_width,
        stride,
        rows_stride,
        columns_stride,
        scale,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        by_hand: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """One program a tile."""
        across = tl.cdiv(padded_width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter), left + tl.arange(0, wide)[None, :]
        logits, rows = logits + top * stride, rows + top * rows_stride
        labels, log_totals, below = labels + top, log_totals + top, height - top
        word = tl.zeros((quarter, wide), dtype=tl.int32)
        for part in tl.static_range(4):
            at = down + part
            label = tl.load(labels + at, mask=at < below, other=-1)[:, None]
            log_total = tl.load(log_totals + at, mask=at < below, other=0.0)[:, None]
            at = at[:, None]
            inside = (label >= 0) & (right < width)
            x = tl.load(logits + at * stride + right, mask=inside, other=0.0).to(tl.float32)
            scaled = tl.where(inside & (right != label), tl.exp(x - log_total) * scale, 0.0)
            if has_rows:
                into = rows + at * rows_stride + right
                tl.store(into, scaled.to(rows.dtype.element_ty), mask=(at < below) & (right < padded_width))
            if part % 2 == 0:
                before = scaled
            else:
                word |= pack_pair(before, scaled, columns, by_hand) << (8 * (part - 1))
        if has_columns:
            store_transposed(word, columns, columns_stride, top, left, padded_height, width, quarter, wide)


def write_others(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    """Write the softmax of `logits` (tokens, words), times `SCALE`, into either or both of two matrices.

    It is zero at the labels; where a label is negative, the whole row is. `log_totals` are the logarithms of the rows'
    sums of exponentials, fp32. `rows` may be wider than there are words, and `columns`, turned over and perhaps a part
    of a larger one, longer than there are tokens: what is left is zero.
    """
    if not has_fp8_kernels(logits):
        write_others_plain(logits, labels, log_totals, rows, columns)
        return
    _write_triton(logits, labels, log_totals, rows, columns)


def _write_fake(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    if rows is not None:
        rows[:, : logits.shape[1]].copy_(logits)
    if columns is not None:
        columns[:, : len(logits)].copy_((logits if rows is None else rows[:, : logits.shape[1]]).t())


@on_fake_tensors(_write_fake)
def _write_triton(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    height, width = logits.shape
    padded_height = height if columns is None else columns.shape[1]
    padded_width = width if rows is None else rows.shape[1]
    room = rows if columns is None else columns
    assert room is not None
    with on_device_of(logits):
        _fp8_slopes_kernel[(triton.cdiv(padded_height, _TALL) * triton.cdiv(padded_width, _WIDE),)](
            logits,
            labels,
            log_totals,
            room if rows is None else rows,
            room,
            height,
            width,
            padded_height,
            padded_width,
            logits.stride(0),
            room.stride(0) if rows is None else rows.stride(0),
            room.stride(0),
            SCALE,
            has_rows=rows is not None,
            has_columns=columns is not None,
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )


def write_others_plain(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    """The plain twin of `write_others`."""
    counted = labels >= 0
    scaled = (logits.float() - log_totals[:, None]).exp_().mul_(SCALE)
    scaled = scaled.scatter_(1, labels.clamp(min=0)[:, None], 0.0).where(counted[:, None], 0.0)
    for room, values in ((rows, scaled), (columns, scaled.t())):
        if room is not None:
            # Padded while wide: not every operation knows the formats of 8 bits.
            room.copy_(F.pad(values, (0, room.shape[1] - values.shape[1])))
