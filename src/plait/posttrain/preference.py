"""Losses over a chosen and a rejected answer. Each is of one pair and knows no others, so no cut changes it.

`chosen` and `rejected` are log-ratios: how much likelier an answer is to the policy than to the reference. Without a
reference they are the policy's own log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def reward_loss(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, center: float = 0.0) -> Tensor:
    """Of two rewards: the chosen one should be larger, by a margin if asked (Bradley and Terry).

    `center` weighs the square of their sum, which keeps rewards around zero.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center * (chosen + rejected) ** 2 if center else loss


def parted(chosen: Tensor, rejected: Tensor, chosen_last: Tensor, rejected_last: Tensor) -> Tensor:
    """Where two rows of tokens are not the same any more, up to the end of the longer one.

    `…_last` are the places of their last tokens. One that has ended differs from one that goes on.
    """
    places = torch.arange(chosen.shape[1], device=chosen.device)
    shorter, longer = torch.minimum(chosen_last, rejected_last), torch.maximum(chosen_last, rejected_last)
    same = (chosen == rejected) & (places <= shorter[:, None])
    return (same.cumprod(1) == 0) & (places <= longer[:, None])


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Rafailov et al., 2023; with `label_smoothing`, the conservative form for labels that may be wrong."""
    ahead = beta * (chosen - rejected)
    return -F.logsigmoid(ahead) * (1.0 - label_smoothing) - F.logsigmoid(-ahead) * label_smoothing


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Azar et al., 2023: a squared distance from `1 / (2 beta)`, so that likely pairs stop pulling."""
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2


def hinge_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Zhao et al., 2023 (SLiC): nothing more to learn once a pair is ahead by `1 / beta`."""
    return F.relu(1.0 - beta * (chosen - rejected))


def kto_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    point: Tensor | float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Tensor:
    """Ethayarajh et al., 2024: each answer by itself is better or worse than a reference point.

    `point` is how far the policy has moved on the whole (a KL divergence, not negative); it is not differentiated.
    """
    good = desirable * (1.0 - (beta * (chosen - point)).sigmoid())
    bad = undesirable * (1.0 - (beta * (point - rejected)).sigmoid())
    return good + bad


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """D'Oosterlinck et al., 2024: chosen answers become likelier, rejected ones less likely."""
    return (1.0 - (beta * chosen).sigmoid()) + (beta * rejected).sigmoid()
