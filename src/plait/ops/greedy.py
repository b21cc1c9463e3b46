"""The likeliest token of each row, and log-probabilities, in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.triton import HAS_TRITON, has_kernels, on_device_of

_BLOCK = 4096

if HAS_TRITON:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _pieces_kernel(logits, most, which, sums, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program for a piece of a row."""
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = piece * block + tl.arange(0, block)
        inside = at < vocabulary
        value = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf")).to(tl.float32)
        peak = tl.max(value, 0)
        # A piece in which nothing is possible must not make its sum undefined.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        here = row * tl.num_programs(1) + piece
        tl.store(most + here, peak)
        tl.store(which + here, tl.min(tl.where((value == peak) & inside, at, vocabulary), 0))
        tl.store(sums + here, tl.sum(tl.exp(value - shift), 0))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _whole_kernel(  # type: ignore[no-untyped-def]
        most, which, sums, token, logprob, vocabulary, pieces, block: tl.constexpr
    ):
        """One program a row."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < pieces
        peaks = tl.load(most + row * pieces + at, mask=inside, other=float("-inf"))
        peak = tl.max(peaks, 0)
        first = tl.load(which + row * pieces + at, mask=inside, other=0)
        chosen = tl.min(tl.where((peaks == peak) & inside, first, vocabulary), 0)
        # Logits that are no numbers must not lead out of the vocabulary.
        tl.store(token + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
        part = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
        shift = tl.where(peaks == float("-inf"), float("-inf"), peaks - peak)
        tl.store(logprob + row, -tl.log(tl.sum(part * tl.exp(shift), 0)))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the likeliest tokens of each row (rows, vocabulary), and its log-probability in fp32."""
    if not _is_fused(logits):
        return greedy_plain(logits)
    rows, vocabulary = logits.shape
    pieces = -(-vocabulary // _BLOCK)
    most, sums = (torch.empty(rows, pieces, dtype=torch.float32, device=logits.device) for _ in range(2))
    which = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with on_device_of(logits):
        _pieces_kernel[(rows, pieces)](logits, most, which, sums, vocabulary, block=_BLOCK, num_warps=8)
        block = triton.next_power_of_2(pieces)
        _whole_kernel[(rows,)](most, which, sums, token, logprob, vocabulary, pieces, block=block, num_warps=1)
    return token, logprob


def greedy_plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin."""
    token = logits.argmax(-1)
    return token, logprob_of_plain(logits, token)


def logprob_of(logits: Tensor, token: Tensor) -> Tensor:
    """The log-probability of one token of each row (rows, vocabulary), in fp32."""
    if not _is_fused(logits):
        return logprob_of_plain(logits, token)
    likeliest, most = greedy(logits)
    own, other = logits.gather(1, torch.stack((token, likeliest), dim=1)).float().unbind(1)
    return most + (own - other)


def logprob_of_plain(logits: Tensor, token: Tensor) -> Tensor:
    """The plain twin."""
    logits = logits.float()
    return logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(-1)


def _is_fused(logits: Tensor) -> bool:
    return has_kernels(logits) and logits.is_contiguous() and logits.dtype != torch.float64
