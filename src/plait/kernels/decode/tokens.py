"""What is written down about each row when it has a new token, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.kernels.decode.dependent_launch import can_launch_dependent, dependent_launch_options
from plait.kernels.triton import HAS_TRITON, has_kernels, on_device_of

_BLOCK = 128

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import follow

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
        chained: tl.constexpr,
    ):
        """One program for some rows."""
        if chained:
            follow()
        row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
        inside = row < rows
        new = tl.load(token + row, mask=inside, other=0)
        so_far = tl.load(counts + row, mask=inside, other=0)
        was_done = tl.load(done + row, mask=inside, other=1) != 0
        place = row * columns + tl.where(was_done, columns - 1, so_far)
        tl.store(tokens + place, new, mask=inside)
        tl.store(logprobs + place, tl.load(logprob + row, mask=inside, other=0.0), mask=inside)
        so_far += tl.where(was_done, 0, 1)
        tl.store(counts + row, so_far, mask=inside)
        stops_here = tl.load(stopped + row, mask=inside, other=1) != 0
        for each in range(count):
            stops_here = stops_here | ((new == tl.load(stops + each)) & (was_done == 0))
        tl.store(stopped + row, stops_here, mask=inside)
        ends = so_far >= tl.load(limits + row, mask=inside, other=0)
        tl.store(done + row, was_done | stops_here | ends, mask=inside)
        tl.store(latest + row, new, mask=inside)


class TokenRecords(NamedTuple):
    """What is known of each row, (rows) each where nothing else is said."""

    latest: Tensor
    """The token that came last."""
    tokens: Tensor
    """All that came (rows, columns), int64; the last column is for what comes when a row is done."""
    logprobs: Tensor
    """Theirs (rows, columns), fp32."""
    counts: Tensor
    """How many came."""
    limits: Tensor
    """How many may come."""
    done: Tensor
    stopped: Tensor
    """Done because a stop token came."""
    stops: Tensor
    """Those tokens (any number)."""


def record_tokens(token: Tensor, logprob: Tensor, book: TokenRecords) -> None:
    """Write each row's new token (rows) down. Changes tensors in place only, so that a graph may repeat it."""
    if not has_kernels(token) or not all(each.is_contiguous() for each in (token, logprob, *book)):
        record_tokens_plain(token, logprob, book)
        return
    rows, columns = book.tokens.shape
    with on_device_of(token):
        _kernel[(-(-rows // _BLOCK),)](
            token,
            logprob,
            *book,
            rows,
            columns,
            len(book.stops),
            block=_BLOCK,
            num_warps=4,
            **dependent_launch_options(can_launch_dependent(token)),
        )


def record_tokens_plain(token: Tensor, logprob: Tensor, book: TokenRecords) -> None:
    """The plain twin."""
    place = torch.where(book.done, book.tokens.shape[1] - 1, book.counts)[:, None]
    book.tokens.scatter_(1, place, token[:, None])
    book.logprobs.scatter_(1, place, logprob[:, None])
    book.counts.add_(~book.done)
    if len(book.stops):
        book.stopped.logical_or_((token[:, None] == book.stops).any(1) & ~book.done)
    book.done.logical_or_(book.stopped | (book.counts >= book.limits))
    book.latest.copy_(token)
