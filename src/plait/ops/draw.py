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
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.chain import chain_options
from plait.ops.chance import CHANCE_BITS, Chance
from plait.ops.greedy import logprob_of
from plait.ops.triton import HAS_TRITON, has_kernels, on_device_of

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

    from plait.ops.chain import follow
    from plait.ops.chance import chance_of

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _power(value, beside, scale):  # type: ignore[no-untyped-def]
        """Exponentials of logits beside another; one that is impossible must not make all others undefined."""
        return tl.exp2((value - tl.where(beside == float("-inf"), 0.0, beside)) * scale)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _weight(power, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """As whole numbers; what is no number has no weight."""
        return tl.where(power > 0.0, power * (1 << bits) + 0.5, 0.0).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def weigh(value, scale, bits: tl.constexpr, is_scaled: tl.constexpr):  # type: ignore[no-untyped-def]
        """Of each piece of logits (pieces, words): the largest, the sum of exponentials, and that of the weights."""
        most = tl.max(tl.where(value == value, value, float("-inf")), 1)
        power = _power(value, most[:, None], 1.4426950408889634)
        total = tl.sum(power, 1)
        if is_scaled:
            power = _power(value, most[:, None], scale)
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
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        here = part * (block // piece) + tl.arange(0, block // piece)
        at = here[:, None] * piece + tl.arange(0, piece)[None, :]
        value = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        peak, total, weight = weigh(value, scale, bits, is_scaled)
        inside, there = here < pieces, row * pieces + here
        tl.store(most + there, peak, mask=inside)
        tl.store(sums + there, total, mask=inside)
        tl.store(weights + there, weight, mask=inside)

    @triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _draw_kernel(  # type: ignore[no-untyped-def]
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
        chance_bits: tl.constexpr,
        chained: tl.constexpr,
    ):
        """One program a row."""
        if chained:
            follow()
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        inside = at < pieces
        chance = tl.load(keys + row)
        if is_hashed:
            chance = chance_of(seed, chance, tl.load(counts + row), chance_bits)
        peaks = tl.load(most + row * pieces + at, mask=inside, other=float("-inf"))
        part = tl.load(sums + row * pieces + at, mask=inside, other=0.0)
        own = tl.load(weights + row * pieces + at, mask=inside, other=0)
        peak = tl.max(peaks, 0)
        # Sums of whole numbers, as large as float64 has them.
        share = _power(peaks, peak, scale)
        share = tl.where(share > 0.0, share, 0.0).to(tl.float64)
        whole = (own.to(tl.float64) * share * (1 << more_bits) + 0.5).to(tl.int64)
        ladder, total = tl.cumsum(whole, 0), tl.sum(whole, 0)
        aim = (total.to(tl.float64) * chance.to(tl.float64) / (1 << chance_bits)).to(tl.int64)
        # Where nothing has any weight, this must not lead out of the vocabulary.
        chosen = tl.minimum(tl.sum((ladder <= aim).to(tl.int32), 0), pieces - 1)
        before = tl.max(tl.where(ladder <= aim, ladder, 0), 0)
        its_whole = tl.max(tl.where(at == chosen, whole, 0), 0)
        its_peak = tl.max(tl.where(at == chosen, peaks, float("-inf")), 0)
        # What is left of the chance, as a weight in the piece. Its words are weighed anew, just as they were before.
        word = chosen * piece + tl.arange(0, piece)
        value = tl.load(logits + row * vocabulary + word, mask=word < vocabulary, other=float("-inf")).to(tl.float32)
        weight = _weight(_power(value, its_peak, scale), bits)
        steps, most_here = tl.cumsum(weight, 0), tl.sum(weight, 0)
        left = (aim - before).to(tl.float64) / tl.maximum(its_whole, 1).to(tl.float64)
        inner = tl.minimum((left * most_here.to(tl.float64)).to(tl.int32), most_here - 1)
        found = tl.minimum(chosen * piece + tl.sum((steps <= inner).to(tl.int32), 0), vocabulary - 1)
        tl.store(token + row, found.to(tl.int64))
        its = tl.sum(tl.where(word == found, value, 0.0), 0)
        every = tl.sum(part * _power(peaks, peak, 1.4426950408889634), 0)
        tl.store(logprob + row, its - peak - tl.log(every))


class Weighed(NamedTuple):
    """What is known of logits after one pass over them, (rows, pieces) each; see [Note: whole numbers in pieces]."""

    most: Tensor
    """The largest of a piece, fp32."""
    sums: Tensor
    """Of the exponentials of all, beside the largest, fp32."""
    weights: Tensor
    """Of all at the temperature, beside the largest, int32."""

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> Weighed:
        """Room for them."""
        most, sums = (torch.empty(rows, pieces_of(vocabulary), device=device) for _ in range(2))
        return cls(most, sums, torch.empty_like(most, dtype=torch.int32))

    def draw(
        self, logits: Tensor, temperature: float, chance: Chance | Tensor, *, chained: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A token of each row of these logits (rows, vocabulary), and its log-probability in fp32."""
        rows, pieces = self.most.shape
        token = torch.empty(rows, dtype=torch.int64, device=logits.device)
        logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
        is_hashed = isinstance(chance, Chance)
        keys, counts, seed = (*chance[:2], chance.seed_bits()) if isinstance(chance, Chance) else (chance, chance, 0)
        block = triton.next_power_of_2(pieces)
        with on_device_of(logits):
            _draw_kernel[(rows,)](
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
                chance_bits=CHANCE_BITS,
                num_warps=max(1, min(32, block // 256)),
                **chain_options(chained),
            )
        return token, logprob


def pieces_of(vocabulary: int) -> int:
    """How many there are."""
    return -(-vocabulary // PIECE)


def scale_at(temperature: float) -> float:
    """What logits are multiplied with, so that powers of two are exponentials at a temperature."""
    return min(math.log2(math.e) / temperature, _STEEPEST)


def draw(logits: Tensor, temperature: float, chance: Chance | Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of logits (rows, vocabulary), at a temperature above 0, and its log-probability in fp32.

    The log-probability is that of temperature 1. `chance` may be the numbers themselves (rows), of `CHANCE_BITS` bits.
    """
    if not _is_fused(logits, chance):
        return draw_plain(logits, temperature, chance)
    rows, vocabulary = logits.shape
    weighed = Weighed.empty(rows, vocabulary, logits.device)
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
    return weighed.draw(logits, temperature, chance)


def draw_plain(logits: Tensor, temperature: float, chance: Chance | Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin, of which the whole row is one piece."""
    token = place_of(weights_of(logits, temperature).cumsum(-1), bits_of(chance))
    return token, logprob_of(logits, token)


def weights_of(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature, of logits (rows, vocabulary), as whole numbers."""
    scores = logits.float()
    if temperature != 1.0:
        scores = (scores - scores.amax(-1, keepdim=True)) * min(1.0 / temperature, _STEEPEST)
    return (scores.softmax(-1) * 2.0**WEIGHT_BITS).round().long()


def place_of(ladder: Tensor, bits: Tensor, total: Tensor | None = None) -> Tensor:
    """Where in sums of weights up to each place (rows, places) chances fall; `total` (rows, 1), if fewer count."""
    total = ladder[:, -1:] if total is None else total
    place = torch.searchsorted(ladder, total * bits[:, None] >> CHANCE_BITS, right=True)
    return place.squeeze(1).clamp(max=ladder.shape[1] - 1)  # logits that are no numbers must not lead out of them


def bits_of(chance: Chance | Tensor) -> Tensor:
    """The numbers that decide (rows)."""
    return chance.bits() if isinstance(chance, Chance) else chance


def can_weigh(vocabulary: int, chance: Chance | Tensor) -> bool:
    """Whether kernels can draw from so many words, with such chances."""
    tensors = chance[:2] if isinstance(chance, Chance) else (chance,)
    known = all(each.is_contiguous() and each.dtype == torch.int64 for each in tensors)
    return known and pieces_of(vocabulary) <= MOST_PIECES


def _is_fused(logits: Tensor, chance: Chance | Tensor) -> bool:
    known = has_kernels(logits) and logits.is_contiguous() and logits.dtype != torch.float64
    return known and can_weigh(logits.shape[1], chance)
