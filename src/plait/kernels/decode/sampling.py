"""A token of each row, drawn from the whole vocabulary, and its log-probability, in one pass over the logits.

[Note: whole numbers in pieces]
Probabilities become whole numbers before they are added up, so that sums do not depend on the order. One pass cannot
know the largest logit of a row beforehand: so the vocabulary is cut into pieces of `PIECE` words, whoever cuts it, and
a word's weight is beside the largest of its own piece, in `WORD_BITS` bits. A piece counts with the sum of its words,
times how far its largest is below that of the row, as a whole number again. A chance picks a piece, and what is left
of it a word there.

What follows from it: a row with the same logits and the same chance gets the same token on a device, whatever else is
in the batch, however its kernels are cut up, and each time. What is drawn always has some weight. Between devices, or
between a kernel and its plain twin, exponentials differ in their last digit: there the token is the same unless the
chance lies that close to the border between two.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from plait.kernels import HAS_TRITON, implementation, on_device_of
from plait.kernels.decode.dependent_launch import dependent_launch_options

# The likeliest token of each row, and log-probabilities, in one pass over the logits.


_GREEDY_BLOCK = 4096

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import wait_for_previous

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _greedy_pieces_kernel(logits, most, which, sums, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program for a piece of a row."""
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = piece * block + tl.arange(0, block)
        inside = at < vocabulary
        value = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf")).to(tl.float32)
        peak = tl.max(value, 0)
        # A piece in which nothing is possible must not make its sum undefined.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        slot = row * tl.num_programs(1) + piece
        tl.store(most + slot, peak)
        tl.store(which + slot, tl.min(tl.where((value == peak) & inside, at, vocabulary), 0))
        tl.store(sums + slot, tl.sum(tl.exp(value - shift), 0))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _whole_kernel(  # type: ignore[no-untyped-def]
        most, which, sums, token, logprob, vocabulary, pieces, block: tl.constexpr, dependent: tl.constexpr
    ):
        """One program a row."""
        if dependent:
            wait_for_previous()
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < pieces
        peaks = tl.load(most + row * pieces + at, mask=inside, other=float("-inf"))
        peak = tl.max(peaks, 0)
        first = tl.load(which + row * pieces + at, mask=inside, other=0)
        chosen = tl.min(tl.where((peaks == peak) & inside, first, vocabulary), 0)
        # Logits that are no numbers must not lead out of the vocabulary.
        tl.store(token + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
        piece_sums = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
        shift = tl.where(peaks == float("-inf"), float("-inf"), peaks - peak)
        tl.store(logprob + row, -tl.log(tl.sum(piece_sums * tl.exp(shift), 0)))


class GreedyPieces(NamedTuple):
    """What is known of logits after one pass over them, (rows, pieces) each."""

    most: Tensor
    """The largest of a piece, fp32."""
    which: Tensor
    """The first token that has it, int32."""
    sums: Tensor
    """Of the exponentials of all, beside the largest, fp32."""
    vocabulary: int

    @classmethod
    def empty(cls, rows: int, pieces: int, vocabulary: int, device: torch.device) -> GreedyPieces:
        """Room for them."""
        most, sums = (torch.empty(rows, pieces, dtype=torch.float32, device=device) for _ in range(2))
        return cls(most, torch.empty(rows, pieces, dtype=torch.int32, device=device), sums, vocabulary)

    def greedy(self, *, dependent: bool = False) -> tuple[Tensor, Tensor]:
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
                **dependent_launch_options(dependent),
            )
        return token, logprob


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the likeliest tokens of each row (rows, vocabulary), and its log-probability in fp32."""
    if not _is_greedy_fused(logits):
        return greedy_plain(logits)
    rows, vocabulary = logits.shape
    pieces = GreedyPieces.empty(rows, -(-vocabulary // _GREEDY_BLOCK), vocabulary, logits.device)
    with on_device_of(logits):
        _greedy_pieces_kernel[pieces.most.shape](logits, *pieces, block=_GREEDY_BLOCK, num_warps=8)
    return pieces.greedy()


def greedy_plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin."""
    token = logits.argmax(-1)
    return token, logprob_of_plain(logits, token)


def logprob_of(logits: Tensor, token: Tensor) -> Tensor:
    """The log-probability of one token of each row (rows, vocabulary), in fp32."""
    if not _is_greedy_fused(logits):
        return logprob_of_plain(logits, token)
    likeliest, most = greedy(logits)
    chosen, best = logits.gather(1, torch.stack((token, likeliest), dim=1)).float().unbind(1)
    return most + (chosen - best)


def logprob_of_plain(logits: Tensor, token: Tensor) -> Tensor:
    """The plain twin."""
    logits = logits.float()
    return logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(-1)


def _is_greedy_fused(logits: Tensor) -> bool:
    return implementation("decode", logits) == "plait" and logits.is_contiguous()


# Numbers that decide draws, without a generator.
#
# [Note: a row's chance is its own]
# The number that decides a choice is a hash of (seed, key of the row, how many tokens the row has so far). So a text
# depends on its prompt, its key and the seed, and on nothing else: neither on what else is in the batch, nor on which
# rank computes it, nor on rows that leave early. There is no generator whose state would have to be carried along, and
# nothing that a CUDA graph could not repeat.


COUNTER_RNG_BITS = 28
"""Of the number that decides."""
_MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _hash_kernel(bits):  # type: ignore[no-untyped-def]
        """`_hash`, of 32 bits in 64."""
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return bits ^ (bits >> 16)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def random_bits(seed, key, count, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """The chance of a row, from a seed that `CounterRNG.seed_bits` gave, its key and its count (int64 both)."""
        begun = _hash_kernel((seed.to(tl.int64) + key) & 0xFFFFFFFF)
        keyed = _hash_kernel(begun ^ ((key >> 32) & 0xFFFFFFFF))
        return _hash_kernel((keyed + count * 0x9E3779B9) & 0xFFFFFFFF) >> (32 - bits)


class CounterRNG(NamedTuple):
    """What the chances of rows follow from; see [Note: a row's chance is its own]."""

    keys: Tensor
    """(rows), int64"""
    counts: Tensor
    """How many tokens each row has (rows), int64."""
    seed: int

    def bits(self) -> Tensor:
        """A number of `COUNTER_RNG_BITS` bits for each row."""
        keyed = _hash(_hash(self.keys + _seed_hash(self.seed) & _MASK) ^ (self.keys >> 32 & _MASK))
        return _hash(keyed + self.counts * 0x9E3779B9 & _MASK) >> (32 - COUNTER_RNG_BITS)

    def seed_bits(self) -> int:
        """The seed as a kernel takes it: with a sign, for Triton would compile another one for more than 31 bits."""
        begun = _seed_hash(self.seed)
        return begun - (1 << 32) if begun >> 31 else begun


def with_seed(key: int, seed: int) -> int:
    """The key whose chances under seed 0 are those of `key` under `seed`, so that one batch may mix seeds."""
    return (key >> 32) << 32 | (key + _seed_hash(seed)) & _MASK


def _seed_hash(seed: int) -> int:
    return _hash((seed & _MASK) ^ (seed >> 32 & _MASK))


def _hash(bits: _Bits) -> _Bits:
    """Scatter 32 bits, held in 64, over all 32: two rounds of shift and multiply."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & _MASK
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & _MASK
    return bits ^ bits >> 16


PIECE = 64
"""Words of a piece; the tiles of every kernel must be multiples."""
WORD_BITS = 24
"""Of the weight of the largest word in a piece: sums of a piece fit into 31 bits."""
MORE_BITS = 8
"""That a word of the row's largest piece counts with beyond those: sums of `MOST_PIECES` are exact in float64."""
MOST_PIECES = 1 << 14
WEIGHT_BITS = 34
"""Of a probability of 1 in the plain twin; together with the chance it must stay below 63."""
_BLOCK = 4096
_STEEPEST = 1e30
"""Any difference of logits times this is as good as infinite, and no difference times this is none."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from plait.kernels.decode.dependent_launch import wait_for_previous

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _exp_relative(value, reference, scale):  # type: ignore[no-untyped-def]
        """Exponentials of logits beside another; one that is impossible must not make all others undefined."""
        return tl.exp2((value - tl.where(reference == float("-inf"), 0.0, reference)) * scale)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _weight(power, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """As whole numbers; what is no number has no weight."""
        return tl.where(power > 0.0, power * (1 << bits) + 0.5, 0.0).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def weigh(value, scale, bits: tl.constexpr, is_scaled: tl.constexpr):  # type: ignore[no-untyped-def]
        """Of each piece of logits (pieces, words): the largest, the sum of exponentials, and that of the weights."""
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
        """One program for some pieces of a row."""
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
        """One program a row."""
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
        # Sums of whole numbers, as large as float64 has them.
        share = _exp_relative(peaks, peak, scale)
        share = tl.where(share > 0.0, share, 0.0).to(tl.float64)
        whole = (piece_weights.to(tl.float64) * share * (1 << more_bits) + 0.5).to(tl.int64)
        cumulative, total = tl.cumsum(whole, 0), tl.sum(whole, 0)
        aim = (total.to(tl.float64) * random.to(tl.float64) / (1 << rng_bits)).to(tl.int64)
        # Where nothing has any weight, this must not lead out of the vocabulary.
        chosen = tl.minimum(tl.sum((cumulative <= aim).to(tl.int32), 0), pieces - 1)
        before = tl.max(tl.where(cumulative <= aim, cumulative, 0), 0)
        its_whole = tl.max(tl.where(at == chosen, whole, 0), 0)
        its_peak = tl.max(tl.where(at == chosen, peaks, float("-inf")), 0)
        # What is left of the chance, as a weight in the piece. Its words are weighed anew, just as they were before.
        candidates = chosen * piece + tl.arange(0, piece)
        value = tl.load(logits + row * vocabulary + candidates, mask=candidates < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        weight = _weight(_exp_relative(value, its_peak, scale), bits)
        steps, most_here = tl.cumsum(weight, 0), tl.sum(weight, 0)
        left = (aim - before).to(tl.float64) / tl.maximum(its_whole, 1).to(tl.float64)
        inner = tl.minimum((left * most_here.to(tl.float64)).to(tl.int32), most_here - 1)
        picked = tl.minimum(chosen * piece + tl.sum((steps <= inner).to(tl.int32), 0), vocabulary - 1)
        tl.store(token + row, picked.to(tl.int64))
        its = tl.sum(tl.where(candidates == picked, value, 0.0), 0)
        every = tl.sum(piece_sums * _exp_relative(peaks, peak, 1.4426950408889634), 0)
        tl.store(logprob + row, its - peak - tl.log(every))


class SamplingPieces(NamedTuple):
    """What is known of logits after one pass over them, (rows, pieces) each; see [Note: whole numbers in pieces]."""

    most: Tensor
    """The largest of a piece, fp32."""
    sums: Tensor
    """Of the exponentials of all, beside the largest, fp32."""
    weights: Tensor
    """Of all at the temperature, beside the largest, int32."""

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> SamplingPieces:
        """Room for them."""
        most, sums = (torch.empty(rows, pieces_of(vocabulary), device=device) for _ in range(2))
        return cls(most, sums, torch.empty_like(most, dtype=torch.int32))

    def sample(
        self, logits: Tensor, temperature: float, rng: CounterRNG | Tensor, *, dependent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A token of each row of these logits (rows, vocabulary), and its log-probability in fp32."""
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
    """How many there are."""
    return -(-vocabulary // PIECE)


def scale_at(temperature: float) -> float:
    """What logits are multiplied with, so that powers of two are exponentials at a temperature."""
    return min(math.log2(math.e) / temperature, _STEEPEST)


def sample_tokens(logits: Tensor, temperature: float, rng: CounterRNG | Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of logits (rows, vocabulary), at a temperature above 0, and its log-probability in fp32.

    The log-probability is that of temperature 1. `rng` may be the numbers themselves (rows), of `COUNTER_RNG_BITS`
    bits.
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
    """The plain twin, of which the whole row is one piece."""
    token = pick_index(weights_of(logits, temperature).cumsum(-1), bits_of(rng))
    return token, logprob_of(logits, token)


def weights_of(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature, of logits (rows, vocabulary), as whole numbers."""
    scores = logits.float()
    if temperature != 1.0:
        scores = (scores - scores.amax(-1, keepdim=True)) * min(1.0 / temperature, _STEEPEST)
    return (scores.softmax(-1) * 2.0**WEIGHT_BITS).round().long()


def pick_index(cumulative: Tensor, bits: Tensor, total: Tensor | None = None) -> Tensor:
    """Where in sums of weights up to each place (rows, places) chances fall; `total` (rows, 1), if fewer count."""
    total = cumulative[:, -1:] if total is None else total
    index = torch.searchsorted(cumulative, total * bits[:, None] >> COUNTER_RNG_BITS, right=True)
    return index.squeeze(1).clamp(max=cumulative.shape[1] - 1)  # logits that are no numbers must not lead out of them


def bits_of(rng: CounterRNG | Tensor) -> Tensor:
    """The numbers that decide (rows)."""
    return rng.bits() if isinstance(rng, CounterRNG) else rng


def can_sample(vocabulary: int, rng: CounterRNG | Tensor) -> bool:
    """Whether kernels can draw from so many words, with such chances."""
    tensors = rng[:2] if isinstance(rng, CounterRNG) else (rng,)
    known = all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in tensors)
    return known and pieces_of(vocabulary) <= MOST_PIECES


def _is_fused(logits: Tensor, rng: CounterRNG | Tensor) -> bool:
    return _is_greedy_fused(logits) and can_sample(logits.shape[1], rng)
