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

from plait.spec import LossTerm

KlKind = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KlKind = "k1") -> Tensor:
    """How far the policy is from the reference, judged by the tokens that it took.

    `k1` has no bias and may be negative; `k2` is half its square; `k3` has no bias and is never negative.
    """
    ratio = logprobs - reference
    if kind == "k1":
        return ratio
    if kind == "k2":
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
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(kept, places, -1).amax(1, keepdim=True)
    at_end = (places == last) & kept
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
