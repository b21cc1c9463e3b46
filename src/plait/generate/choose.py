"""Choosing the next token of every row, on the device, without waiting for it.

[Note: a row's chance is its own]
The number that decides a choice is a hash of (seed, key of the row, how many tokens the row has so far). So a text
depends on its prompt, its key and the seed, and on nothing else: neither on what else is in the batch, nor on which
rank computes it, nor on rows that leave early. There is no generator whose state would have to be carried along, and
nothing that a CUDA graph could not repeat.

[Note: whole numbers are added]
Probabilities become whole numbers before they are added up. Their sums do not depend on the order, so a choice is the
same whatever kernel adds, a chance below the sum always meets a token that has some weight, and deterministic runs,
which refuse to add up floating-point numbers on a GPU, may draw too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.generate.options import Sampling
from plait.ops.greedy import greedy, logprob_of

CHANCE_BITS, WEIGHT_BITS = 28, 34
"""Of the number that decides, and of a probability of 1; together they must stay below 63."""
_WORD = 0xFFFFFFFF


def chances(seed: int, keys: Tensor, steps: Tensor) -> Tensor:
    """A number of `CHANCE_BITS` bits for each row; see [Note: a row's chance is its own]."""
    seeded = _mixed(torch.full_like(keys, seed & _WORD) ^ ((seed >> 32) & _WORD))
    keyed = _mixed(_mixed(seeded + keys & _WORD) ^ (keys >> 32 & _WORD))
    return _mixed(keyed + steps * 0x9E3779B9 & _WORD) >> (32 - CHANCE_BITS)


def _mixed(bits: Tensor) -> Tensor:
    """Scatter 32 bits, held in 64, over all 32: two rounds of shift and multiply."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & _WORD
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & _WORD
    return bits ^ bits >> 16


def choose(logits: Tensor, chance: Tensor | None, sampling: Sampling, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability under the model itself, from logits (rows, vocabulary).

    `chance` (rows) is what `chances` gave; the temperature 0 needs none. `seen` (rows, vocabulary) marks the tokens
    that a repetition penalty is for.
    """
    if chance is None and seen is None:
        return greedy(logits)
    scores = logits.float()
    if seen is not None:
        scores = _penalised(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0 or chance is None:
        token = scores.argmax(-1)
    else:
        token = _draw(scores if sampling.temperature == 1.0 else scores / sampling.temperature, chance, sampling)
    return token, logprob_of(logits, token)


def _draw(scores: Tensor, chance: Tensor, sampling: Sampling) -> Tensor:
    order: Tensor | None = None
    share = sampling.top_p if sampling.top_p is not None and sampling.top_p < 1.0 else None
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        scores, order = scores.topk(sampling.top_k)
    elif share is not None:
        scores, order = scores.sort(descending=True, stable=True)
    # See [Note: whole numbers are added].
    weights = (scores.softmax(-1) * 2.0**WEIGHT_BITS).round().long()
    ladder = weights.cumsum(-1)
    total = ladder[:, -1:]
    if share is not None:
        # The likeliest has nothing before it, and stays. What goes is at the end, so the ladder is right without it.
        kept = (ladder - weights).double() < share * total.double()
        total = (weights * kept).sum(-1, keepdim=True)
    place = torch.searchsorted(ladder, total * chance[:, None] >> CHANCE_BITS, right=True)
    place = place.clamp(max=weights.shape[1] - 1)  # logits that are no numbers must not lead out of the vocabulary
    return (place if order is None else order.gather(1, place)).squeeze(1)


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)
