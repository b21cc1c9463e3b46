"""The formulas of PPO and GRPO, as pure functions of tensors, and the controllers of the KL weight.

Shapes are (answers, tokens); `mask` is one where a token belongs to the answer. A loss is a `LossTerm` (a sum over the
tokens of the mask, and their count), so that it does not depend on how a batch was split into micro-batches.
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
    """Return, for each sampled token, an estimate of the KL divergence of the policy from the reference.

    `k1`, the log-ratio, is unbiased and may be negative; `k2` is half its square; `k3` is unbiased and never negative.
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
    """Return the reward of each token: minus `beta` times its KL estimate, plus the answer's score at its last token.

    Outside the mask rewards are zero.
    """
    scores = scores if clip_score is None else scores.clamp(-clip_score, clip_score)
    kept = mask.bool()
    rewards = torch.where(kept, -beta * kl, torch.zeros_like(kl))
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(kept, positions, -1).amax(1, keepdim=True)
    at_end = (positions == last) & kept
    return rewards + torch.where(at_end, scores[:, None].to(rewards.dtype), 0.0)


class Estimate(NamedTuple):
    """The advantage and the return of each token."""

    advantages: Tensor
    returns: Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """Return advantages and returns by generalized advantage estimation (Schulman et al., 2015).

    The value after the last token of the mask is zero. Tokens outside the mask are ignored, and get zeros.
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
    """A clipped loss and its statistics, which are sums over the mask: divide them by `loss.count`."""

    loss: LossTerm
    clipped: Tensor
    """The number of tokens for which the clipped value was the larger one."""
    kl: Tensor
    """The estimated KL divergence (`k3`) from the policy that generated the answers."""


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
    """Return the clipped loss of PPO (Schulman et al., 2017).

    The ratio is clipped to `1 - clip` and `1 + clip_high` (`1 + clip` if None). With `dual_clip`, the loss of a token
    with a negative advantage is at most `-dual_clip * advantage`, however large the ratio (Ye et al., 2020).
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
    """Return half the squared error; with `clip`, values that move further than `clip` from `old` gain nothing."""
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
    """A constant weight of the KL divergence."""

    beta: float

    def after(self, kl: float, samples: int) -> FixedKl:
        """Return this controller: the weight does not change."""
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A weight of the KL divergence that rises while that is above its target, else falls (Ziegler et al., 2019)."""

    beta: float
    target: float
    horizon: float = 10_000.0
    """The number of samples after which a divergence 20% off its target has changed the weight by about 20%."""

    def after(self, kl: float, samples: int) -> AdaptiveKl:
        """Return the controller after `samples` answers with mean divergence `kl`; unchanged if `kl` is not finite."""
        if not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * samples / self.horizon))


# GRPO: the advantage of an answer is relative to the other answers to its prompt, its group.
#
# Shapes are (answers, tokens); the answers of a group are consecutive rows. An answer whose reward is not finite has no
# reward: its group is computed without it, and its advantage is zero.


Baseline = Literal["mean", "others"]
Spread = Literal["group", "none"]
Weighting = Literal["answer", "token", "length"]


class Judged(NamedTuple):
    """The advantages of all answers, and statistics of the groups."""

    advantages: Tensor
    """One value per answer; zero for one without a reward."""
    known: Tensor
    """Which answers had a finite reward."""
    alike: Tensor
    """The number of groups whose answers all have the same reward, so that all advantages are zero."""


def group_advantages(
    rewards: Tensor, size: int, *, baseline: Baseline = "mean", spread: Spread = "group", eps: float = 1e-4
) -> Judged:
    """Return the advantage of each answer in its group of `size`: its reward minus a baseline.

    The baseline is the `mean` reward of the group (Shao et al., 2024), or that of the `others` (leave-one-out). With
    `spread` `group` the difference is divided by the group's standard deviation, with `none` it is not (Liu et al.,
    2025).
    """
    groups = rewards.detach().float().view(-1, size)
    known = groups.isfinite()
    count = known.sum(1, keepdim=True)
    kept = torch.where(known, groups, 0.0)
    # Equal rewards are found by comparing them, not by their mean: its rounding error would become an advantage.
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
    """The GRPO loss, and statistics, which are sums over the tokens of the mask."""

    loss: LossTerm
    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    """The estimated KL divergence (`k3`) from the reference; zero without one."""


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
    """Return the clipped loss with one advantage per answer, plus `beta` times the KL divergence from the reference.

    `weighting` says which mean over tokens is taken. `answer`: the mean over answers of each answer's mean (Shao et
    al., 2024). `token`: the mean over all tokens (Yu et al., 2025). `length`: the sum over all tokens, divided by the
    number of answers times `longest`, whatever their lengths (Liu et al., 2025).
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
"""Added to the variance, so that equal values become zeros and not NaN."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values of the mask shifted and scaled to mean 0 and variance 1, and zeros elsewhere.

    Sums are in fp64.
    """
    kept = torch.where(mask.bool(), values.detach().double(), 0.0)  # no product: values outside may be inf or NaN
    count, total = mask.double().sum(), kept.sum()
    mean = total / count.clamp(min=1)
    variance = ((kept * kept).sum() - total * mean).clamp(min=0.0) / (count - 1).clamp(min=1)  # the unbiased variance
    white = (values - mean.to(values.dtype)) * torch.rsqrt(variance.to(values.dtype) + EPS)
    return torch.where(mask.bool(), white, 0.0)


# Advantages and returns of a rollout, from rewards, log-probabilities and values.


class Advantages(NamedTuple):
    """Advantage and return of each token of each answer; zeros elsewhere."""

    advantages: Tensor
    returns: Tensor
    """The targets of the critic; zeros if there is none."""
    zero_std_groups: float = 0.0
    """The share of groups in which all advantages are zero."""


def of_ppo(
    ppo: PpoConfig, rewards: Tensor, logprobs: Tensor, reference: Tensor, values: Tensor, mask: Tensor, beta: float
) -> Advantages:
    """Return the advantages of PPO, by GAE from the rewards of tokens (see `token_rewards`) and the critic's values.

    With `ppo.whiten` they are whitened over the whole rollout.
    """
    kl = kl_estimate(logprobs, reference)
    earned = token_rewards(rewards, kl, mask, beta=beta, clip_score=ppo.clip_score)
    estimate = gae(earned, values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return Advantages(whiten(estimate.advantages, mask) if ppo.whiten else estimate.advantages, estimate.returns)


def of_grpo(grpo: GrpoConfig, rewards: Tensor, mask: Tensor) -> Advantages:
    """Return the advantages of GRPO: relative to the other answers to the same prompt, equal for all tokens."""
    judged = group_advantages(rewards, grpo.group, baseline=grpo.baseline, spread=grpo.spread)
    advantages = judged.advantages[:, None].expand(mask.shape).to(torch.float32)
    idle = ~(judged.advantages.view(-1, grpo.group) != 0).any(1)
    return Advantages(advantages.contiguous(), torch.zeros_like(advantages), float(idle.double().mean()))


def divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Return the KL estimate `k1` from the reference: the sum over an answer's tokens, as a mean over answers.

    Answers without tokens do not count.
    """
    kl = torch.where(mask, kl_estimate(logprobs, reference), 0.0).double().sum(1)
    answers = mask.any(1)
    return float(kl[answers].mean()) if bool(answers.any()) else 0.0
