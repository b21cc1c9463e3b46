"""Choosing the next token of every row, on the device, without waiting for it.

[Note: a row's chance is its own]
The number that decides a choice is a hash of (seed, key of the row, how many tokens the row has so far). So a text
depends on its prompt, its key and the seed, and on nothing else: neither on what else is in the batch, nor on which
rank computes it, nor on rows that leave early. There is no generator whose state would have to be carried along, and
nothing that a CUDA graph could not repeat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.generate.options import Sampling

_WORD = 0xFFFFFFFF


def uniform(seed: int, keys: Tensor, steps: Tensor) -> Tensor:
    """A number in (0, 1) for each row, fp32; see [Note: a row's chance is its own]."""
    seeded = _mixed(torch.full_like(keys, seed & _WORD) ^ ((seed >> 32) & _WORD))
    keyed = _mixed(_mixed(seeded + keys & _WORD) ^ (keys >> 32 & _WORD))
    bits = _mixed(keyed + steps * 0x9E3779B9 & _WORD) >> 9
    return (bits.float() + 0.5) * 2.0**-23  # 23 bits and a half: all that fp32 holds, and never 0 or 1


def _mixed(bits: Tensor) -> Tensor:
    """Scatter 32 bits, held in 64, over all 32: two rounds of shift and multiply."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & _WORD
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & _WORD
    return bits ^ bits >> 16


def choose(logits: Tensor, chances: Tensor | None, sampling: Sampling, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability under the model itself, from logits (rows, vocabulary).

    `chances` (rows) are what `uniform` gave; the temperature 0 needs none. `seen` (rows, vocabulary) marks the tokens
    that a repetition penalty is for.
    """
    logits = logits.float()
    scores = logits if seen is None else _penalised(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0 or chances is None:
        token = scores.argmax(-1)
    else:
        token = _draw(scores / sampling.temperature, chances, sampling)
    logprob = logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(-1)
    return token, logprob


def _draw(scores: Tensor, chances: Tensor, sampling: Sampling) -> Tensor:
    order: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        scores, order = scores.topk(sampling.top_k)
    elif sampling.top_p is not None and sampling.top_p < 1.0:
        scores, order = scores.sort(descending=True, stable=True)
    weights = scores.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(before >= sampling.top_p, 0.0)  # the likeliest has nothing before it, and stays
    ladder = weights.cumsum(-1)
    place = torch.searchsorted(ladder, (chances[:, None] * ladder[:, -1:]), right=True)
    # Rounding may put a chance behind the last token that has any weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    place = torch.minimum(place, last)
    return (place if order is None else order.gather(1, place)).squeeze(1)


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)
