"""Recording the new token of each row of a batch, in one kernel: tokens, counts, and which rows are done."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.kernels import HAS_TRITON, implementation, on_device_of
from plait.kernels.decode.dependent_launch import can_launch_dependent, dependent_launch_options

_BLOCK = 128

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import wait_for_previous

    @triton.jit(do_not_specialize=["rows", "columns", "count"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        token,
        logprob,
        latest,
        tokens,
        logprobs,
        counts,
        limits,
        done,
        stopped,
        stops,
        rows,
        columns,
        count,
        block: tl.constexpr,
        dependent: tl.constexpr,
    ):
        """Record the new tokens of `block` rows per program."""
        if dependent:
            wait_for_previous()
        row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
        inside = row < rows
        new = tl.load(token + row, mask=inside, other=0)
        so_far = tl.load(counts + row, mask=inside, other=0)
        was_done = tl.load(done + row, mask=inside, other=1) != 0
        slot = row * columns + tl.where(was_done, columns - 1, so_far)
        tl.store(tokens + slot, new, mask=inside)
        tl.store(logprobs + slot, tl.load(logprob + row, mask=inside, other=0.0), mask=inside)
        so_far += tl.where(was_done, 0, 1)
        tl.store(counts + row, so_far, mask=inside)
        stops_here = tl.load(stopped + row, mask=inside, other=1) != 0
        for index in range(count):
            stops_here = stops_here | ((new == tl.load(stops + index)) & (was_done == 0))
        tl.store(stopped + row, stops_here, mask=inside)
        at_limit = so_far >= tl.load(limits + row, mask=inside, other=0)
        tl.store(done + row, was_done | stops_here | at_limit, mask=inside)
        tl.store(latest + row, new, mask=inside)


class TokenRecords(NamedTuple):
    """The state of the rows, of shape (rows) unless stated otherwise."""

    latest: Tensor
    """The last token."""
    tokens: Tensor
    """All new tokens (rows, columns), int64; the last column is not read: tokens of rows that are done go there."""
    logprobs: Tensor
    """Their log-probabilities (rows, columns), fp32."""
    counts: Tensor
    """The number of new tokens."""
    limits: Tensor
    """The maximum number of new tokens."""
    done: Tensor
    stopped: Tensor
    """Whether a row is done because of a stop token."""
    stops: Tensor
    """The stop tokens (any number)."""


def record_tokens(token: Tensor, logprob: Tensor, records: TokenRecords) -> None:
    """Append each row's new token (rows). Only changes tensors in place, so that a CUDA graph can contain it."""
    contiguous = all(tensor.is_contiguous() for tensor in (token, logprob, *records))
    if implementation("record_tokens", token) == "torch" or not contiguous:
        record_tokens_plain(token, logprob, records)
        return
    rows, columns = records.tokens.shape
    with on_device_of(token):
        _kernel[(-(-rows // _BLOCK),)](
            token,
            logprob,
            *records,
            rows,
            columns,
            len(records.stops),
            block=_BLOCK,
            num_warps=4,
            **dependent_launch_options(can_launch_dependent(token)),
        )


def record_tokens_plain(token: Tensor, logprob: Tensor, records: TokenRecords) -> None:
    """Do what `record_tokens` does, with torch operations."""
    column = torch.where(records.done, records.tokens.shape[1] - 1, records.counts)[:, None]
    records.tokens.scatter_(1, column, token[:, None])
    records.logprobs.scatter_(1, column, logprob[:, None])
    records.counts.add_(~records.done)
    if len(records.stops):
        records.stopped.logical_or_((token[:, None] == records.stops).any(1) & ~records.done)
    records.done.logical_or_(records.stopped | (records.counts >= records.limits))
    records.latest.copy_(token)
