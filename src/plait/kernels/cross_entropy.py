"""Cross-entropy kernels for chunks of logits (rows, columns): a row is a token, a column is a token of the vocabulary.

With all of the vocabulary on one rank, one kernel computes the losses and overwrites the logits with their gradient.
Where the vocabulary is sharded over ranks, one kernel computes the statistics of each row, the ranks exchange these,
and a second kernel overwrites the logits with their gradient. With fake tensors (`plait plan`) nothing is launched, but
the same memory is allocated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels.fp8 import has_fp8_kernels
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, interprets, on_device_of

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _maximum_and_sum(logits, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the largest logit of a row, and the sum of exp(logit - largest)."""
        # The running sum is relative to the running maximum, so that nothing overflows.
        maximum = float("-inf")
        total = 0.0
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(x, 0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), 0)
            maximum = larger
        return maximum, total

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _store_grads(logits, label, log_total, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Overwrite a row of logits with its gradient: the softmax, minus 1 at the label."""
        for start in range(0, columns, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_total) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < columns)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _loss_kernel(logits, labels, losses, columns, stride, ignored: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the loss of each row, and overwrite its logits with their gradient; one program per row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        label = tl.load(labels + row)
        counted = label != ignored
        label = tl.where(counted, label, 0)
        target = tl.load(logits + label).to(tl.float32)
        maximum, total = _maximum_and_sum(logits, columns, block)
        log_total = maximum + tl.log(total)
        tl.store(losses + row, tl.where(counted, log_total - target, 0.0))
        tl.debug_barrier()  # all threads have read the target before it is overwritten
        _store_grads(logits, label, log_total, columns, block)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _statistics_kernel(logits, local_labels, maxima, sums, targets, columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the largest logit, the sum of exp(logit - largest), and the label's logit; one program per row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        local_label = tl.maximum(tl.load(local_labels + row), 0)
        tl.store(targets + row, tl.load(logits + local_label).to(tl.float32))
        maximum, total = _maximum_and_sum(logits, columns, block)
        tl.store(maxima + row, maximum)
        tl.store(sums + row, total)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _grads_kernel(logits, local_labels, log_totals, columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Overwrite each row of logits with its gradient; one program per row."""
        row = tl.program_id(0).to(tl.int64)
        _store_grads(logits + row * stride, tl.load(local_labels + row), tl.load(log_totals + row), columns, block)


def has_loss_kernels(logits: Tensor) -> bool:
    """Whether the kernels of this file support these logits."""
    return logits.is_cuda and implementation("cross_entropy", logits) == "plait"


def _loss_and_grads_fake(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits


@on_fake_tensors(_loss_and_grads_fake)
def loss_and_grads_triton(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and `logits` (rows, columns), overwritten with their gradient."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _loss_kernel[(rows,)](
            logits, labels, losses, columns, logits.stride(0), ignored=ignore_index, block=block, num_warps=16
        )
    return losses, logits


def _row_statistics_fake(logits: Tensor, local_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    statistics = logits.new_empty(3, len(logits), dtype=torch.float32)
    return statistics[0], statistics[1], statistics[2]


@on_fake_tensors(_row_statistics_fake)
def row_statistics_triton(logits: Tensor, local_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row, in fp32: the largest logit, the sum of exp(logit - largest), the logit at `local_label`."""
    rows, columns = logits.shape
    statistics = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _statistics_kernel[(rows,)](
            logits,
            local_label,
            statistics[0],
            statistics[1],
            statistics[2],
            columns,
            logits.stride(0),
            block=block,
            num_warps=16,
        )
    return statistics[0], statistics[1], statistics[2]


def _logit_grads_fake(logits: Tensor, local_label: Tensor, log_total: Tensor) -> Tensor:
    return logits


@on_fake_tensors(_logit_grads_fake)
def logit_grads_triton(logits: Tensor, local_label: Tensor, log_total: Tensor) -> Tensor:
    """Overwrite logits with their gradient, and return them.

    `log_total` is the logarithm of each row's softmax denominator. A `local_label` of -1 means that the label is not in
    this rank's columns.
    """
    rows, columns = logits.shape
    block = _block(columns)
    with torch.cuda.device(logits.device):
        _grads_kernel[(rows,)](logits, local_label, log_total, columns, logits.stride(0), block=block, num_warps=16)
    return logits


def _block(columns: int) -> int:
    return min(8192, int(triton.next_power_of_2(columns)))


# The probabilities of all tokens of the vocabulary except the label's, in 8 bits: the kernel and its plain form.
#
# The matrix of probabilities is stored twice, row by row and transposed; see [Note: transposed in words of four bytes]
# in `fp8`. The logits are read once for both, and nothing is stored in 16 bits. A probability is at most 1, so the
# scale is fixed, and no reduction has to find the largest one.


PROB_SCALE = 2.0**15
"""The factor on probabilities: 1 becomes 32,768; the maximum of e5m2 is 57,344. The smallest nonzero one is 2**-31."""
_TALL, _WIDE = 128, 64
"""Rows and columns of a tile, as for other casts to 8 bits: both copies are stored in whole cache lines."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.fp8 import pack_pair, store_transposed

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _fp8_probs_kernel(  # type: ignore[no-untyped-def]
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
        """Compute and store one tile per program."""
        across = tl.cdiv(padded_width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter), left + tl.arange(0, wide)[None, :]
        logits, rows = logits + top * stride, rows + top * rows_stride
        labels, log_totals, below = labels + top, log_totals + top, height - top
        packed = tl.zeros((quarter, wide), dtype=tl.int32)
        for step in tl.static_range(4):
            at = down + step
            label = tl.load(labels + at, mask=at < below, other=-1)[:, None]
            log_total = tl.load(log_totals + at, mask=at < below, other=0.0)[:, None]
            at = at[:, None]
            inside = (label >= 0) & (right < width)
            x = tl.load(logits + at * stride + right, mask=inside, other=0.0).to(tl.float32)
            scaled = tl.where(inside & (right != label), tl.exp(x - log_total) * scale, 0.0)
            if has_rows:
                offset = rows + at * rows_stride + right
                tl.store(offset, scaled.to(rows.dtype.element_ty), mask=(at < below) & (right < padded_width))
            if step % 2 == 0:
                before = scaled
            else:
                packed |= pack_pair(before, scaled, columns, by_hand) << (8 * (step - 1))
        if has_columns:
            store_transposed(packed, columns, columns_stride, top, left, padded_height, width, quarter, wide)


def write_fp8_probs(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    """Write the softmax of `logits` (tokens, vocabulary), times `PROB_SCALE`, into `rows` and, transposed, `columns`.

    The label's entry of a row is set to zero; so is the whole row of a negative label. `log_totals` are the logarithms
    of the rows' sums of exponentials, fp32. `rows` may have more columns than the vocabulary has tokens, and `columns`,
    which may be a view of a larger matrix, more columns than there are tokens: further columns become zero.
    """
    if not has_fp8_kernels(logits):
        write_fp8_probs_plain(logits, labels, log_totals, rows, columns)
        return
    _write_fp8_probs_triton(logits, labels, log_totals, rows, columns)


def _write_fp8_probs_fake(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    if rows is not None:
        rows[:, : logits.shape[1]].copy_(logits)
    if columns is not None:
        columns[:, : len(logits)].copy_((logits if rows is None else rows[:, : logits.shape[1]]).t())


@on_fake_tensors(_write_fp8_probs_fake)
def _write_fp8_probs_triton(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    height, width = logits.shape
    padded_height = height if columns is None else columns.shape[1]
    padded_width = width if rows is None else rows.shape[1]
    target = rows if columns is None else columns
    assert target is not None
    with on_device_of(logits):
        _fp8_probs_kernel[(triton.cdiv(padded_height, _TALL) * triton.cdiv(padded_width, _WIDE),)](
            logits,
            labels,
            log_totals,
            target if rows is None else rows,
            target,
            height,
            width,
            padded_height,
            padded_width,
            logits.stride(0),
            target.stride(0) if rows is None else rows.stride(0),
            target.stride(0),
            PROB_SCALE,
            has_rows=rows is not None,
            has_columns=columns is not None,
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )


def write_fp8_probs_plain(
    logits: Tensor, labels: Tensor, log_totals: Tensor, rows: Tensor | None, columns: Tensor | None
) -> None:
    """Do what `write_fp8_probs` does, with torch operations."""
    counted = labels >= 0
    scaled = (logits.float() - log_totals[:, None]).exp_().mul_(PROB_SCALE)
    scaled = scaled.scatter_(1, labels.clamp(min=0)[:, None], 0.0).where(counted[:, None], 0.0)
    for target, values in ((rows, scaled), (columns, scaled.t())):
        if target is not None:
            # Padded in fp32: not every operation supports the 8-bit dtypes.
            target.copy_(F.pad(values, (0, target.shape[1] - values.shape[1])))


# A tensor times a scalar tensor, in another dtype: scales the gradients that the loss saved by the gradient of the
# loss, in the backward pass.
#
# torch.mul with `out=` in another dtype reaches a third of the memory bandwidth. `scaled` is a `torch.library`
# operator, so that a compiled backward pass can contain it.


_SCALED_BLOCK = 4096

if HAS_TRITON:

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _scaled_kernel(x, factor, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def scaled_plain(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `scaled` returns, by torch operations."""
    if x.dtype == torch.float32 and dtype != torch.float32:
        # Rounded while it is written: an fp32 product would take as much memory as `x`.
        return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
    return (x.float() * factor).to(dtype)


def _scaled_fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype).copy_(x)


@on_fake_tensors(_scaled_fake)
def _scaled_triton(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    with on_device_of(x):
        _scaled_kernel[(max(1, -(-x.numel() // _SCALED_BLOCK)),)](
            x, factor, out, x.numel(), block=_SCALED_BLOCK, num_warps=8
        )
    return out


@torch.library.custom_op("plait::scaled", mutates_args=())
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x * factor` in `dtype`, for `x` of 16 or 32 bits; computed in fp32 and rounded once."""
    x = x.contiguous()
    if implementation("scaled", x) == "torch":
        return scaled_plain(x, factor, dtype)
    return _scaled_triton(x, factor, dtype)


@scaled.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
