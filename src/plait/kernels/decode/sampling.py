"""Greedy and random sampling from the whole vocabulary, with log-probabilities, in one pass over the logits.

[Note: integer weights in pieces]
Probabilities are converted to integer *weights* before they are added up, so that sums do not depend on the order of
addition. A weight is an exponential relative to a largest logit, but if logits are read only once, the largest logit of
a row is not known while they are read. So the vocabulary is divided into *pieces* of `PIECE` tokens, the same in every
kernel, and a token's weight is relative to the largest logit of its own piece, in `WORD_BITS` bits. The weight of a
piece is the sum of its tokens' weights, times the exponential of the difference between its largest logit and that of
the row, rounded to an integer again. A random number selects a piece; what remains of it selects a token of the piece.

Hence a row with the same logits and the same random number always gets the same token on a device, whatever other rows
are in the batch and however the kernels are tiled. A sampled token always has a positive weight. Between devices, or
between a kernel and its plain form, exponentials may differ in their last bit: then the token is the same, except where
the random number is as close as that to the border between two tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from plait.kernels import HAS_TRITON, implementation, on_device_of
from plait.kernels.decode.dependent_launch import dependent_launch_options

_GREEDY_BLOCK = 4096

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import wait_for_previous

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _greedy_pieces_kernel(logits, most, which, sums, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Compute the values of `GreedyPieces`; one program per piece of a row."""
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = piece * block + tl.arange(0, block)
        inside = at < vocabulary
        value = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf")).to(tl.float32)
        peak = tl.max(value, 0)
        # A piece of which all logits are -inf must not make its sum NaN.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        slot = row * tl.num_programs(1) + piece
        tl.store(most + slot, peak)
        tl.store(which + slot, tl.min(tl.where((value == peak) & inside, at, vocabulary), 0))
        tl.store(sums + slot, tl.sum(tl.exp(value - shift), 0))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _whole_kernel(  # type: ignore[no-untyped-def]
        most, which, sums, token, logprob, vocabulary, pieces, block: tl.constexpr, dependent: tl.constexpr
    ):
        """Choose the most likely token from the `GreedyPieces` of a row; one program per row."""
        if dependent:
            wait_for_previous()
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < pieces
        peaks = tl.load(most + row * pieces + at, mask=inside, other=float("-inf"))
        peak = tl.max(peaks, 0)
        first = tl.load(which + row * pieces + at, mask=inside, other=0)
        chosen = tl.min(tl.where((peaks == peak) & inside, first, vocabulary), 0)
        # With NaN logits the token must still be one of the vocabulary.
        tl.store(token + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
        piece_sums = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
        shift = tl.where(peaks == float("-inf"), float("-inf"), peaks - peak)
        tl.store(logprob + row, -tl.log(tl.sum(piece_sums * tl.exp(shift), 0)))


class GreedyPieces(NamedTuple):
    """What greedy sampling needs to know of the logits, (rows, pieces) each; here a piece is any part of a row."""

    most: Tensor
    """The largest logit of a piece, fp32."""
    which: Tensor
    """The first token that has it, int32."""
    sums: Tensor
    """The sum of exponentials relative to the largest, fp32."""
    vocabulary: int

    @classmethod
    def empty(cls, rows: int, pieces: int, vocabulary: int, device: torch.device) -> GreedyPieces:
        """Return uninitialized tensors."""
        most, sums = (torch.empty(rows, pieces, dtype=torch.float32, device=device) for _ in range(2))
        return cls(most, torch.empty(rows, pieces, dtype=torch.int32, device=device), sums, vocabulary)

    def greedy(self, *, dependent: bool = False) -> tuple[Tensor, Tensor]:
        """Return the most likely token of each row (the first of several), and its log-probability in fp32."""
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
                **dependent_launch_options(dependent),
            )
        return token, logprob


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row of logits (rows, vocabulary), and its log-probability in fp32."""
    if not _is_greedy_fused(logits):
        return greedy_plain(logits)
    rows, vocabulary = logits.shape
    pieces = GreedyPieces.empty(rows, -(-vocabulary // _GREEDY_BLOCK), vocabulary, logits.device)
    with on_device_of(logits):
        _greedy_pieces_kernel[pieces.most.shape](logits, *pieces, block=_GREEDY_BLOCK, num_warps=8)
    return pieces.greedy()


def greedy_plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `greedy` returns, by torch operations."""
    token = logits.argmax(-1)
    return token, logprob_of_plain(logits, token)


def logprob_of(logits: Tensor, token: Tensor) -> Tensor:
    """Return the log-probability of `token` (rows) in each row of logits (rows, vocabulary), in fp32."""
    if not _is_greedy_fused(logits):
        return logprob_of_plain(logits, token)
    likeliest, most = greedy(logits)
    chosen, best = logits.gather(1, torch.stack((token, likeliest), dim=1)).float().unbind(1)
    return most + (chosen - best)


def logprob_of_plain(logits: Tensor, token: Tensor) -> Tensor:
    """Return what `logprob_of` returns, by torch operations."""
    logits = logits.float()
    return logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(-1)


def _is_greedy_fused(logits: Tensor) -> bool:
    return implementation("decode", logits) == "plait" and logits.is_contiguous()


# [Note: counter-based random numbers]
# The random number for a token is a hash of (seed, key of the row, number of tokens that the row has so far). So an
# answer depends only on its prompt, its key and the seed: not on other rows of the batch, on the rank that computes it,
# or on rows that end early. No generator state is updated, so a CUDA graph can compute it.


COUNTER_RNG_BITS = 28
"""Bits of a random number."""
_MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _hash_kernel(bits):  # type: ignore[no-untyped-def]
        """Return what `_hash` returns for 32 bits in a 64-bit integer."""
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return bits ^ (bits >> 16)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def random_bits(seed, key, count, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the random number of a row, from `CounterRNG.seed_bits`, its key and its count (both int64)."""
        begun = _hash_kernel((seed.to(tl.int64) + key) & 0xFFFFFFFF)
        keyed = _hash_kernel(begun ^ ((key >> 32) & 0xFFFFFFFF))
        return _hash_kernel((keyed + count * 0x9E3779B9) & 0xFFFFFFFF) >> (32 - bits)


class CounterRNG(NamedTuple):
    """Computes a random number for each row of a batch; see [Note: counter-based random numbers]."""

    keys: Tensor
    """(rows), int64"""
    counts: Tensor
    """The number of tokens of each row (rows), int64."""
    seed: int

    def bits(self) -> Tensor:
        """Return a random number of `COUNTER_RNG_BITS` bits for each row."""
        keyed = _hash(_hash(self.keys + _seed_hash(self.seed) & _MASK) ^ (self.keys >> 32 & _MASK))
        return _hash(keyed + self.counts * 0x9E3779B9 & _MASK) >> (32 - COUNTER_RNG_BITS)

    def seed_bits(self) -> int:
        """Return the hashed seed for a kernel, signed: above 31 bits, Triton would compile another kernel."""
        begun = _seed_hash(self.seed)
        return begun - (1 << 32) if begun >> 31 else begun


def with_seed(key: int, seed: int) -> int:
    """Return the key that with seed 0 gives the random numbers of `key` with `seed`, so that a batch may mix seeds."""
    return (key >> 32) << 32 | (key + _seed_hash(seed)) & _MASK


def _seed_hash(seed: int) -> int:
    return _hash((seed & _MASK) ^ (seed >> 32 & _MASK))


def _hash(bits: _Bits) -> _Bits:
    """Return a hash of 32 bits, held in 64: shift and multiply, twice."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & _MASK
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & _MASK
    return bits ^ bits >> 16


PIECE = 64
"""Tokens of a piece; the tile width of every kernel must be a multiple."""
WORD_BITS = 24
"""Bits of the largest weight in a piece: the sum of a piece then fits into 31 bits."""
MORE_BITS = 8
"""Further bits of the weights of pieces: sums of `MOST_PIECES` of them are still exact in float64."""
MOST_PIECES = 1 << 14
WEIGHT_BITS = 34
"""Bits of a probability of 1 in the plain form; together with those of the random number at most 62."""
_BLOCK = 4096
_STEEPEST = 1e30
"""The largest inverse temperature that is used; a finite one, so that a difference of 0 times this is 0."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import wait_for_previous

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _exp_relative(value, reference, scale):  # type: ignore[no-untyped-def]
        """Return exponentials of logits relative to a reference; a reference of -inf must not make them NaN."""
        return tl.exp2((value - tl.where(reference == float("-inf"), 0.0, reference)) * scale)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _weight(power, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return integer weights; that of NaN is 0."""
        return tl.where(power > 0.0, power * (1 << bits) + 0.5, 0.0).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def weigh(value, scale, bits: tl.constexpr, is_scaled: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return for each piece (pieces, tokens): the largest logit, the sum of exponentials, the sum of weights."""
        most = tl.max(tl.where(value == value, value, float("-inf")), 1)
        power = _exp_relative(value, most[:, None], 1.4426950408889634)
        total = tl.sum(power, 1)
        if is_scaled:
            power = _exp_relative(value, most[:, None], scale)
        return most, total, tl.sum(_weight(power, bits), 1)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _pieces_kernel(  # type: ignore[no-untyped-def]
        logits,
        most,
        sums,
        weights,
        vocabulary,
        pieces,
        scale,
        is_scaled: tl.constexpr,
        block: tl.constexpr,
        piece: tl.constexpr,
        bits: tl.constexpr,
    ):
        """Compute the values of `SamplingPieces`; one program per `block` tokens of a row."""
        row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
        piece_index = program * (block // piece) + tl.arange(0, block // piece)
        at = piece_index[:, None] * piece + tl.arange(0, piece)[None, :]
        value = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        peak, total, weight = weigh(value, scale, bits, is_scaled)
        inside, there = piece_index < pieces, row * pieces + piece_index
        tl.store(most + there, peak, mask=inside)
        tl.store(sums + there, total, mask=inside)
        tl.store(weights + there, weight, mask=inside)

    @triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _sample_kernel(  # type: ignore[no-untyped-def]
        logits,
        most,
        sums,
        weights,
        keys,
        counts,
        token,
        logprob,
        vocabulary,
        pieces,
        scale,
        seed,
        is_hashed: tl.constexpr,
        block: tl.constexpr,
        piece: tl.constexpr,
        bits: tl.constexpr,
        more_bits: tl.constexpr,
        rng_bits: tl.constexpr,
        dependent: tl.constexpr,
    ):
        """Sample a token from the `SamplingPieces` of a row; one program per row."""
        if dependent:
            wait_for_previous()
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < pieces
        random = tl.load(keys + row)
        if is_hashed:
            random = random_bits(seed, random, tl.load(counts + row), rng_bits)
        peaks = tl.load(most + row * pieces + at, mask=inside, other=float("-inf"))
        piece_sums = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
        piece_weights = tl.load(weights + row * pieces + at, mask=inside, other=0)
        peak = tl.max(peaks, 0)
        # Weights are integers, and their sums small enough to be exact in float64.
        share = _exp_relative(peaks, peak, scale)
        share = tl.where(share > 0.0, share, 0.0).to(tl.float64)
        scaled_weights = (piece_weights.to(tl.float64) * share * (1 << more_bits) + 0.5).to(tl.int64)
        cumulative, total = tl.cumsum(scaled_weights, 0), tl.sum(scaled_weights, 0)
        aim = (total.to(tl.float64) * random.to(tl.float64) / (1 << rng_bits)).to(tl.int64)
        # Where all weights are 0, the token must still be one of the vocabulary.
        chosen = tl.minimum(tl.sum((cumulative <= aim).to(tl.int32), 0), pieces - 1)
        before = tl.max(tl.where(cumulative <= aim, cumulative, 0), 0)
        its_scaled_weight = tl.max(tl.where(at == chosen, scaled_weights, 0), 0)
        its_peak = tl.max(tl.where(at == chosen, peaks, float("-inf")), 0)
        # The remainder of the random number, as a weight in the piece, whose weights are computed again.
        candidates = chosen * piece + tl.arange(0, piece)
        value = tl.load(logits + row * vocabulary + candidates, mask=candidates < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        weight = _weight(_exp_relative(value, its_peak, scale), bits)
        steps, most_here = tl.cumsum(weight, 0), tl.sum(weight, 0)
        left = (aim - before).to(tl.float64) / tl.maximum(its_scaled_weight, 1).to(tl.float64)
        inner = tl.minimum((left * most_here.to(tl.float64)).to(tl.int32), most_here - 1)
        picked = tl.minimum(chosen * piece + tl.sum((steps <= inner).to(tl.int32), 0), vocabulary - 1)
        tl.store(token + row, picked.to(tl.int64))
        its = tl.sum(tl.where(candidates == picked, value, 0.0), 0)
        every = tl.sum(piece_sums * _exp_relative(peaks, peak, 1.4426950408889634), 0)
        tl.store(logprob + row, its - peak - tl.log(every))


class SamplingPieces(NamedTuple):
    """What sampling needs to know of the logits, (rows, pieces) each; see [Note: integer weights in pieces]."""

    most: Tensor
    """The largest logit of a piece, fp32."""
    sums: Tensor
    """The sum of exponentials relative to the largest, fp32."""
    weights: Tensor
    """The sum of weights at the temperature, int32."""

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> SamplingPieces:
        """Return uninitialized tensors."""
        most, sums = (torch.empty(rows, pieces_of(vocabulary), device=device) for _ in range(2))
        return cls(most, sums, torch.empty_like(most, dtype=torch.int32))

    def sample(
        self, logits: Tensor, temperature: float, rng: CounterRNG | Tensor, *, dependent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample a token from each row of logits (rows, vocabulary); return it and its log-probability in fp32."""
        rows, pieces = self.most.shape
        token = torch.empty(rows, dtype=torch.int64, device=logits.device)
        logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
        is_hashed = isinstance(rng, CounterRNG)
        keys, counts, seed = (*rng[:2], rng.seed_bits()) if isinstance(rng, CounterRNG) else (rng, rng, 0)
        block = triton.next_power_of_2(pieces)
        with on_device_of(logits):
            _sample_kernel[(rows,)](
                logits,
                *self,
                keys,
                counts,
                token,
                logprob,
                logits.shape[1],
                pieces,
                scale_at(temperature),
                seed,
                is_hashed=is_hashed,
                block=block,
                piece=PIECE,
                bits=WORD_BITS,
                more_bits=MORE_BITS,
                rng_bits=COUNTER_RNG_BITS,
                num_warps=max(1, min(32, block // 256)),
                **dependent_launch_options(dependent),
            )
        return token, logprob


def pieces_of(vocabulary: int) -> int:
    """Return the number of pieces of a vocabulary."""
    return -(-vocabulary // PIECE)


def scale_at(temperature: float) -> float:
    """Return the factor by which exp2(logits * factor) equals exp(logits / temperature)."""
    return min(math.log2(math.e) / temperature, _STEEPEST)


def sample_tokens(logits: Tensor, temperature: float, rng: CounterRNG | Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token of each row of logits (rows, vocabulary) at a temperature above 0.

    Return the tokens and their log-probabilities in fp32, at temperature 1. `rng` computes the random numbers, or is a
    tensor of them (rows), of `COUNTER_RNG_BITS` bits each.
    """
    if not _is_fused(logits, rng):
        return sample_tokens_plain(logits, temperature, rng)
    rows, vocabulary = logits.shape
    weighed = SamplingPieces.empty(rows, vocabulary, logits.device)
    with on_device_of(logits):
        _pieces_kernel[(rows, -(-vocabulary // _BLOCK))](
            logits,
            *weighed,
            vocabulary,
            pieces_of(vocabulary),
            scale_at(temperature),
            is_scaled=temperature != 1.0,
            block=_BLOCK,
            piece=PIECE,
            bits=WORD_BITS,
            num_warps=8,
        )
    return weighed.sample(logits, temperature, rng)


def sample_tokens_plain(logits: Tensor, temperature: float, rng: CounterRNG | Tensor) -> tuple[Tensor, Tensor]:
    """Return what `sample_tokens` returns, by torch operations, with the whole row as one piece."""
    token = pick_index(weights_of(logits, temperature).cumsum(-1), bits_of(rng))
    return token, logprob_of(logits, token)


def weights_of(logits: Tensor, temperature: float) -> Tensor:
    """Return the probabilities of logits (rows, vocabulary) at a temperature, as integers of `WEIGHT_BITS` bits."""
    scores = logits.float()
    if temperature != 1.0:
        scores = (scores - scores.amax(-1, keepdim=True)) * min(1.0 / temperature, _STEEPEST)
    return (scores.softmax(-1) * 2.0**WEIGHT_BITS).round().long()


def pick_index(cumulative: Tensor, bits: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the index that the random numbers `bits` (rows) select, given cumulative weights (rows, indices).

    `total` (rows, 1) is the sum of the weights that may be selected; by default, of all.
    """
    total = cumulative[:, -1:] if total is None else total
    index = torch.searchsorted(cumulative, total * bits[:, None] >> COUNTER_RNG_BITS, right=True)
    return index.squeeze(1).clamp(max=cumulative.shape[1] - 1)  # for NaN logits


def bits_of(rng: CounterRNG | Tensor) -> Tensor:
    """Return the random numbers (rows)."""
    return rng.bits() if isinstance(rng, CounterRNG) else rng


def can_sample(vocabulary: int, rng: CounterRNG | Tensor) -> bool:
    """Whether the kernels support a vocabulary of this size, and these random numbers."""
    tensors = rng[:2] if isinstance(rng, CounterRNG) else (rng,)
    known = all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in tensors)
    return known and pieces_of(vocabulary) <= MOST_PIECES


def _is_fused(logits: Tensor, rng: CounterRNG | Tensor) -> bool:
    return _is_greedy_fused(logits) and can_sample(logits.shape[1], rng)
