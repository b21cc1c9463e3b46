"""The likeliest token of each row, and log-probabilities, in one pass over the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.chain import chain_options
from plait.ops.triton import HAS_TRITON, has_kernels, on_device_of

_BLOCK = 4096

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.ops.chain import follow

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
        most, which, sums, token, logprob, vocabulary, pieces, block: tl.constexpr, chained: tl.constexpr
    ):
        """One program a row."""
        if chained:
            follow()
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


class Pieces(NamedTuple):
    """What is known of logits after one pass over them, (rows, pieces) each."""

    most: Tensor
    """The largest of a piece, fp32."""
    which: Tensor
    """The first token that has it, int32."""
    sums: Tensor
    """Of the exponentials of all, beside the largest, fp32."""
    vocabulary: int

    @classmethod
    def empty(cls, rows: int, pieces: int, vocabulary: int, device: torch.device) -> Pieces:
        """Room for them."""
        most, sums = (torch.empty(rows, pieces, dtype=torch.float32, device=device) for _ in range(2))
        return cls(most, torch.empty(rows, pieces, dtype=torch.int32, device=device), sums, vocabulary)

    def likeliest(self, *, chained: bool = False) -> tuple[Tensor, Tensor]:
        """The first of the likeliest tokens of each row, and its log-probability in fp32."""
        rows, pieces = self.most.shape
        token = torch.empty(rows, dtype=torch.int64, device=self.most.device)
        logprob = torch.empty(rows, dtype=torch.float32, device=self.most.device)
        block = triton.next_power_of_2(pieces)
        with on_device_of(token):
            _whole_kernel[(rows,)](
                self.most,
                self.which,
                self.sums,
                token,
                logprob,
                self.vocabulary,
                pieces,
                block=block,
                num_warps=max(1, min(8, block // 256)),
                **chain_options(chained),
            )
        return token, logprob


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the likeliest tokens of each row (rows, vocabulary), and its log-probability in fp32."""
    if not _is_fused(logits):
        return greedy_plain(logits)
    rows, vocabulary = logits.shape
    pieces = Pieces.empty(rows, -(-vocabulary // _BLOCK), vocabulary, logits.device)
    with on_device_of(logits):
        _pieces_kernel[pieces.most.shape](logits, *pieces, block=_BLOCK, num_warps=8)
    return pieces.likeliest()


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
