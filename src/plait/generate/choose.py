"""Choosing the next token of every row, on the device, without waiting for it.

Drawing from the whole vocabulary, which rollouts do, has a short way in `ops.draw`; see [Note: whole numbers in pieces]
there. What cuts words off or penalises them goes the long way here, with whole numbers too: sums of them do not depend
on the order, a chance below the sum always meets a token that has some weight, and deterministic runs, which refuse to
add up floating-point numbers on a GPU, may draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.generate.options import Sampling
from plait.ops import Chance, bits_of, draw, greedy, logprob_of, place_of, weights_of


def choose(
    logits: Tensor, chance: Chance | Tensor | None, sampling: Sampling, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability under the model itself, from logits (rows, vocabulary).

    `chance` is what decides, or its numbers (rows); the temperature 0 needs none. `seen` (rows, vocabulary) marks the
    tokens that a repetition penalty is for.
    """
    if seen is None and (chance is None or sampling.temperature == 0.0):
        return greedy(logits)
    if seen is None and chance is not None and sampling.draws_from_all:
        return draw(logits, sampling.temperature, chance)
    scores = logits if seen is None else _penalised(logits.float(), seen, sampling.repetition_penalty)
    if chance is None or sampling.temperature == 0.0:
        token = scores.argmax(-1)
    else:
        token = _draw(scores, bits_of(chance), sampling)
    return token, logprob_of(logits, token)


def _draw(scores: Tensor, bits: Tensor, sampling: Sampling) -> Tensor:
    order: Tensor | None = None
    share = sampling.top_p if sampling.top_p is not None and sampling.top_p < 1.0 else None
    # A temperature changes no order, and fp32 neither: both are for what is left.
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        scores, order = scores.topk(sampling.top_k)
    elif share is not None:
        scores, order = scores.sort(descending=True, stable=True)
    weights = weights_of(scores, sampling.temperature)
    ladder, total = weights.cumsum(-1), None
    if share is not None:
        # The likeliest has nothing before it, and stays. What goes is at the end, so the ladder is right without it.
        kept = (ladder - weights).double() < share * ladder[:, -1:].double()
        total = (weights * kept).sum(-1, keepdim=True)
    place = place_of(ladder, bits, total)
    return place if order is None else order.gather(1, place[:, None]).squeeze(1)


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)
