"""The arithmetic of PPO: pure functions of tensors, and two small controllers.

Shapes are (answers, tokens); `mask` is one where a token belongs to the answer. A loss is a `LossTerm`, a sum over the
tokens of the mask, so that it does not depend on how a batch was cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plait.config import GrpoConfig, PpoConfig
from plait.models import LossTerm

KlKind = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlKind = "k1") -> Tensor:
    """How far the policy is from the reference, judged by the tokens that it took.

    `k1` has no bias and may be negative; `k2` is half its square; `k3` has no bias and is never negative.
    """
    ratio = logprobs - reference
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return 0.5 * ratio * ratio
    return torch.expm1(-ratio) + ratio


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, *, beta: Tensor | float, clip_score: float | None = None
) -> Tensor:
    """What each token earns: minus `beta` times its divergence, and the answer's score at its last token.

    An answer without a token earns nothing. Outside the mask rewards are zero.
    """
    scores = scores if clip_score is None else scores.clamp(-clip_score, clip_score)
    kept = mask.bool()
    rewards = torch.where(kept, -beta * kl, torch.zeros_like(kl))
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(kept, positions, -1).amax(1, keepdim=True)
    at_end = (positions == last) & kept
    return rewards + torch.where(at_end, scores[:, None].to(rewards.dtype), 0.0)


class Estimate(NamedTuple):
    """What became of the tokens of a rollout."""

    advantages: Tensor
    returns: Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """Generalised advantage estimation (Schulman et al., 2015). Nothing follows the last token of the mask.

    Tokens outside the mask, before or after an answer, have no part in it and get zero.
    """
    kept = mask.bool()
    rewards, values = torch.where(kept, rewards, 0.0), torch.where(kept, values, 0.0)
    advantages = torch.zeros_like(rewards)
    running, following = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for step in range(rewards.shape[1] - 1, -1, -1):
        inside = kept[:, step]
        surprise = rewards[:, step] + gamma * following - values[:, step]
        running = torch.where(inside, surprise + gamma * lam * running, running)
        following = torch.where(inside, values[:, step], following)
        advantages[:, step] = torch.where(inside, running, 0.0)
    return Estimate(advantages, torch.where(kept, advantages + values, 0.0))


class Clipped(NamedTuple):
    """A loss that was clipped, and what is told of it: sums over the mask, to be divided by `loss.count`."""

    loss: LossTerm
    clipped: Tensor
    """Tokens where the clipped side decided."""
    kl: Tensor
    """Estimated divergence from the policy that the rollout was made with (`k3`)."""


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Clipped:
    """The clipped objective (Schulman et al., 2017), as a loss.

    `clip_high`: another bound above than below. `dual_clip`: for negative advantages the loss is at most so many times
    the advantage, however large the ratio (Ye et al., 2020).
    """
    kept = mask.bool()
    change = torch.where(kept, logprobs - old, 0.0)
    ratio = change.exp()
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    loss = torch.maximum(free, bound)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    with torch.no_grad():
        clipped = ((bound > free) & kept).sum()
        divergence = torch.where(kept, torch.expm1(change) - change, 0.0).sum()
    return Clipped(LossTerm(torch.where(kept, loss, 0.0).sum(), kept.sum()), clipped, divergence)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2) -> Clipped:
    """Half the squared error; where `clip` is given, a value does not gain by moving further than that from `old`."""
    kept = mask.bool()
    values = torch.where(kept, values, returns)
    free = (values - returns) ** 2
    if clip is None:
        worst, decided = free, torch.zeros_like(kept)
    else:
        bound = (old + (values - old).clamp(-clip, clip) - returns) ** 2
        worst, decided = torch.maximum(free, bound), bound > free
    loss = LossTerm(0.5 * torch.where(kept, worst, 0.0).sum(), kept.sum())
    return Clipped(loss, (decided & kept).sum(), torch.zeros((), device=values.device))


@dataclass(frozen=True, slots=True)
class FixedKl:
    """A weight of the divergence that stays."""

    beta: float

    def after(self, kl: float, samples: int) -> FixedKl:
        """The same again."""
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A weight that is raised while the divergence is above its target, and lowered below (Ziegler et al., 2019)."""

    beta: float
    target: float
    horizon: float = 10_000.0
    """Samples after which a divergence that is off by a fifth has changed the weight by a fifth."""

    def after(self, kl: float, samples: int) -> AdaptiveKl:
        """The controller once `samples` answers have shown a mean divergence of `kl`; as it was where none is known."""
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * samples / self.horizon))


# The arithmetic of GRPO: several answers to one prompt judge each other.
#
# Shapes are (answers, tokens); the answers of a prompt lie side by side. A reward that is not finite means that nothing
# is known of the answer: it takes no part in its group, and teaches nothing.


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


# Whitening of masked values.


EPS = 1e-8
"""Added to a variance, so that equal values become zeros."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values of variance one and mean zero where the mask is not zero, by sums in fp64; zero elsewhere."""
    kept = torch.where(mask.bool(), values.detach().double(), 0.0)  # no product: what lies outside may not be finite
    count, total = mask.double().sum(), kept.sum()
    mean = total / count.clamp(min=1)
    variance = ((kept * kept).sum() - total * mean).clamp(min=0.0) / (count - 1).clamp(min=1)  # the unbiased one
    white = (values - mean.to(values.dtype)) * torch.rsqrt(variance.to(values.dtype) + EPS)
    return torch.where(mask.bool(), white, 0.0)


# What answers were worth: from rewards, log-probabilities and values to what is learned from. Pure functions.


class Advantages(NamedTuple):
    """For each token of each answer; zero outside of them."""

    advantages: Tensor
    returns: Tensor
    """What the critic learns; zeros where there is none."""
    zero_std_groups: float = 0.0
    """Share of the groups in which no answer was better than another, and which so teach nothing."""


def of_ppo(
    ppo: PpoConfig, rewards: Tensor, logprobs: Tensor, reference: Tensor, values: Tensor, mask: Tensor, beta: float
) -> Advantages:
    """A token pays `beta` times its divergence, the last one gets the reward; advantages by GAE.

    They are whitened over everything that is given, which is the whole rollout.
    """
    kl = kl_estimate(logprobs, reference)
    earned = token_rewards(rewards, kl, mask, beta=beta, clip_score=ppo.clip_score)
    estimate = gae(earned, values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return Advantages(whiten(estimate.advantages, mask) if ppo.whiten else estimate.advantages, estimate.returns)


def of_grpo(grpo: GrpoConfig, rewards: Tensor, mask: Tensor) -> Advantages:
    """How much better each answer is than the others to the same prompt, the same for all of its tokens."""
    judged = group_advantages(rewards, grpo.group, baseline=grpo.baseline, spread=grpo.spread)
    advantages = judged.advantages[:, None].expand(mask.shape).to(torch.float32)
    idle = ~(judged.advantages.view(-1, grpo.group) != 0).any(1)
    return Advantages(advantages.contiguous(), torch.zeros_like(advantages), float(idle.double().mean()))


def divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Of an answer from the reference: summed over its tokens, and the mean over answers that have any."""
    kl = torch.where(mask, kl_estimate(logprobs, reference), 0.0).double().sum(1)
    answers = mask.any(1)
    return float(kl[answers].mean()) if bool(answers.any()) else 0.0
