"""What answers were worth: from rewards, log-probabilities and values to what is learned from. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.config import GrpoConfig, PpoConfig
from plait.posttrain.grpo_math import group_advantages
from plait.posttrain.masked import whiten
from plait.posttrain.ppo_math import gae, kl_estimate, token_rewards


class Worth(NamedTuple):
    """For each token of each answer; zero outside of them."""

    advantages: Tensor
    returns: Tensor
    """What the critic learns; zeros where there is none."""
    zero_std_groups: float = 0.0
    """Share of the groups in which no answer was better than another, and which so teach nothing."""


def of_ppo(
    ppo: PpoConfig, rewards: Tensor, logprobs: Tensor, reference: Tensor, values: Tensor, mask: Tensor, beta: float
) -> Worth:
    """A token pays `beta` times its divergence, the last one gets the reward; advantages by GAE.

    They are whitened over everything that is given, which is the whole rollout.
    """
    kl = kl_estimate(logprobs, reference)
    earned = token_rewards(rewards, kl, mask, beta=beta, clip_score=ppo.clip_score)
    found = gae(earned, values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return Worth(whiten(found.advantages, mask) if ppo.whiten else found.advantages, found.returns)


def of_grpo(grpo: GrpoConfig, rewards: Tensor, mask: Tensor) -> Worth:
    """How much better each answer is than the others to the same prompt, the same for all of its tokens."""
    judged = group_advantages(rewards, grpo.group, baseline=grpo.baseline, spread=grpo.spread)
    advantages = judged.advantages[:, None].expand(mask.shape).to(torch.float32)
    idle = ~(judged.advantages.view(-1, grpo.group) != 0).any(1)
    return Worth(advantages.contiguous(), torch.zeros_like(advantages), float(idle.double().mean()))


def divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Of an answer from the reference: summed over its tokens, and the mean over answers that have any."""
    kl = torch.where(mask, kl_estimate(logprobs, reference), 0.0).double().sum(1)
    answers = mask.any(1)
    return float(kl[answers].mean()) if bool(answers.any()) else 0.0
