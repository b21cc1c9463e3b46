"""The arithmetic of GRPO: several answers to one prompt judge each other.

Shapes are (answers, tokens); the answers of a prompt lie side by side. A reward that is not finite means that nothing
is known of the answer: it takes no part in its group, and teaches nothing.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plait.posttrain.ppo_math import kl_estimate
from plait.spec import LossTerm

Baseline = Literal["mean", "others"]
Spread = Literal["group", "none"]
Weighting = Literal["answer", "token", "length"]


class Judged(NamedTuple):
    """What a group of answers found out."""

    advantages: Tensor
    """One an answer; zero where nothing is known."""
    known: Tensor
    """Which answers had a finite reward."""
    alike: Tensor
    """How many groups had the same reward throughout, and so teach nothing."""


def group_advantages(
    rewards: Tensor, size: int, *, baseline: Baseline = "mean", spread: Spread = "group", eps: float = 1e-4
) -> Judged:
    """How much better each answer is than the others of its group of `size`.

    `baseline`: `mean` of the group, the answer included (Shao et al., 2024), or of the `others` (leave-one-out).
    `spread`: divide by the group's standard deviation, or by `none` (Liu et al., 2025).
    """
    groups = rewards.detach().float().view(-1, size)
    known = groups.isfinite()
    count = known.sum(1, keepdim=True)
    kept = torch.where(known, groups, 0.0)
    # Compared as they are: the mean of equal rewards may be off by a rounding, which would then be learned.
    highest, lowest = groups.where(known, -math.inf).amax(1), groups.where(known, math.inf).amin(1)
    alike = (highest <= lowest)[:, None]
    mean = kept.sum(1, keepdim=True) / count.clamp(min=1)
    if baseline == "others":
        mean = (kept.sum(1, keepdim=True) - kept) / (count - 1).clamp(min=1)
    ahead = torch.where(known & (count > 1), kept - mean, 0.0)
    center = kept.sum(1, keepdim=True) / count.clamp(min=1)
    variance = torch.where(known, (kept - center) ** 2, 0.0).sum(1, keepdim=True) / (count - 1).clamp(min=1)
    if spread == "group":
        ahead = ahead / (variance.sqrt() + eps)
    return Judged(torch.where(alike, 0.0, ahead).flatten(), known.flatten(), (alike & (count > 1)).sum())


class GrpoLoss(NamedTuple):
    """The loss, and sums over the tokens of the mask."""

    loss: LossTerm
    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    """Estimated divergence from the reference (`k3`); zero without one."""


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
    weighting: Weighting = "answer",
    longest: int | None = None,
) -> GrpoLoss:
    """The clipped objective with one advantage an answer, and a penalty for leaving the reference.

    `weighting`: every `answer` counts the same, as first published; every `token` does (Yu et al., 2025); or every
    token, and sums are divided by answers times `longest`, whatever their lengths (`length`; Liu et al., 2025).
    """
    kept = mask.bool()
    ratio = torch.where(kept, logprobs - old, 0.0).exp()
    ahead = advantages[:, None]
    free = -ahead * ratio
    bound = -ahead * ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    loss = torch.maximum(free, bound)
    kl = torch.zeros_like(loss)
    if reference is not None:
        kl = torch.where(kept, kl_estimate(torch.where(kept, logprobs, 0.0), reference, "k3"), 0.0)
        loss = loss + beta * kl
    loss = torch.where(kept, loss, 0.0)
    lengths = kept.sum(1)
    if weighting == "token":
        term = LossTerm(loss.sum(), kept.sum())
    elif weighting == "answer":
        term = LossTerm((loss.sum(1) / lengths.clamp(min=1)).sum(), (lengths > 0).sum())
    else:
        assert longest is not None, "`length` needs the number to divide by"
        term = LossTerm(loss.sum() / longest, torch.as_tensor(len(mask), device=mask.device))
    return GrpoLoss(term, kept.sum(), ((bound > free) & kept).sum(), kl.detach().sum())
