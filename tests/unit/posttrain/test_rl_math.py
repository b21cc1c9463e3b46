"""The arithmetic of PPO and GRPO, against plain loops and small cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.posttrain.rl.algorithms import (
    AdaptiveKl,
    FixedKl,
    gae,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)


def spans(rows: int, length: int) -> Tensor:
    """Masks of answers that begin and end anywhere, one of them empty."""
    mask = torch.zeros(rows, length)
    for row in range(1, rows):
        start = int(torch.randint(0, length, ()))
        mask[row, start : start + 1 + int(torch.randint(0, length - start, ()))] = 1
    return mask


def test_advantages_are_the_discounted_sum_of_surprises() -> None:
    mask, gamma, lam = spans(6, 9), 0.97, 0.9
    rewards, values = torch.randn(6, 9, dtype=torch.float64), torch.randn(6, 9, dtype=torch.float64)
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(6):
        places = mask[row].nonzero().flatten().tolist()
        surprise = {
            at: rewards[row, at] + (gamma * values[row, at + 1] if at + 1 in places else 0.0) - values[row, at]
            for at in places
        }
        for at in range(9):
            expected = sum((gamma * lam) ** (later - at) * surprise[later] for later in places if later >= at)
            expected = expected if at in places else 0.0
            assert float(found.advantages[row, at]) == pytest.approx(float(expected), abs=1e-12)
            with_value = expected + values[row, at] if at in places else 0.0
            assert float(found.returns[row, at]) == pytest.approx(float(with_value), abs=1e-12)


def test_with_lambda_one_returns_are_the_rewards_to_come() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    found = gae(rewards, torch.randn(1, 3), torch.ones(1, 3), gamma=0.5, lam=1.0)
    assert torch.allclose(found.returns, torch.tensor([[1 + 1 + 1.0, 2 + 2.0, 4.0]]))


def test_an_answer_earns_its_score_at_its_last_token_and_pays_for_every_step_away() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [0.0, 0.0, 0.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    found = token_rewards(torch.tensor([10.0, -7.0, 3.0]), kl, mask, beta=0.1, clip_score=5.0)
    expected = torch.tensor([[0, -0.1, 5 - 0.2, 0], [0, 0, 0, -5 - 0.1], [0, 0, 0, 0]])
    assert torch.allclose(found, expected)


def test_the_three_estimates_of_a_divergence() -> None:
    ratio = torch.tensor([-0.5, 0.0, 2.0])
    assert torch.equal(kl_estimate(ratio, torch.zeros(3), "k1"), ratio)
    assert torch.allclose(kl_estimate(ratio, torch.zeros(3), "k2"), ratio**2 / 2)
    assert torch.allclose(kl_estimate(ratio, torch.zeros(3), "k3"), (-ratio).exp() - 1 + ratio)


def test_the_estimates_without_bias_agree_with_the_true_divergence() -> None:
    policy, reference = torch.randn(7, dtype=torch.float64).log_softmax(0), torch.randn(7).double().log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        assert torch.allclose((policy.exp() * kl_estimate(policy, reference, kind)).sum(), true)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 2.0, -2.4, 1),  # gains no more above 1 + 0.2
        (0.5, 2.0, -1.0, 0),  # losing is never clipped
        (0.5, -2.0, 1.6, 1),  # gains no more below 1 - 0.2
        (1.5, -2.0, 3.0, 0),
        (1.1, 2.0, -2.2, 0),
    ],
)
def test_the_clipped_objective(ratio: float, advantage: float, expected: float, clipped: int) -> None:
    one = torch.ones(1, 1)
    found = policy_loss(one * math.log(ratio), one * 0, one * advantage, one, clip=0.2)
    assert float(found.loss.mean()) == pytest.approx(expected)
    assert int(found.clipped) == clipped


def test_a_second_bound_keeps_bad_answers_from_deciding_everything() -> None:
    one = torch.ones(1, 1)
    found = policy_loss(one * math.log(50.0), one * 0, one * -1.0, one, clip=0.2, dual_clip=3.0)
    assert float(found.loss.mean()) == pytest.approx(3.0)


def test_at_the_old_policy_the_gradient_is_minus_the_advantage() -> None:
    old, mask = torch.randn(4, 5), spans(4, 5)
    logprobs = old.clone().requires_grad_()
    advantages = torch.randn(4, 5)
    policy_loss(logprobs, old, advantages, mask).loss.sum.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -advantages * mask)


def test_values_gain_nothing_by_leaving_their_neighbourhood() -> None:
    one = torch.ones(1, 1)
    moved = value_loss(one * 1.0, one * 0.0, one * 1.0, one, clip=0.2)
    assert float(moved.loss.mean()) == pytest.approx(0.5 * 0.8**2)
    assert int(moved.clipped) == 1
    assert float(value_loss(one * 1.0, one * 0.0, one * 1.0, one, clip=None).loss.mean()) == 0.0


def test_what_lies_outside_the_mask_changes_nothing_even_if_it_is_not_finite() -> None:
    mask = spans(5, 6)
    dirty = torch.where(mask.bool(), torch.randn(5, 6), float("nan")).requires_grad_()
    old, advantages = torch.randn(5, 6), torch.randn(5, 6)
    for loss in (
        policy_loss(dirty, old, advantages, mask).loss,
        value_loss(dirty, old, advantages, mask).loss,
        grpo_loss(dirty, old, torch.randn(5), mask, reference=old, beta=0.1).loss,
    ):
        (gradient,) = torch.autograd.grad(loss.mean(), dirty)
        assert bool(gradient.isfinite().all())
        assert bool((gradient[mask == 0] == 0).all())


def test_whitened_values_have_mean_zero_and_variance_one_and_nothing_outside_counts() -> None:
    values, mask = torch.randn(6, 7) * 3 + 5, spans(6, 7)
    values[mask == 0] = math.inf
    white = whiten(values, mask)
    kept = white[mask.bool()]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(kept.var()) == pytest.approx(1.0, abs=1e-4)
    assert not white[mask == 0].any()


def test_one_value_and_none_are_whitened_to_zero() -> None:
    assert not whiten(torch.full((1, 3), 4.0), torch.tensor([[0, 1, 0]])).any()
    assert not whiten(torch.ones(2, 3), torch.zeros(2, 3)).any()


def test_a_controller_raises_its_weight_above_the_target_and_lowers_it_below() -> None:
    adaptive = AdaptiveKl(beta=0.1, target=6.0, horizon=100.0)
    assert adaptive.after(6.0, 10).beta == pytest.approx(0.1)
    assert adaptive.after(60.0, 10).beta == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert adaptive.after(5.4, 10).beta == pytest.approx(0.1 * (1 - 0.1 * 10 / 100))
    assert adaptive.after(math.nan, 10) == adaptive
    assert FixedKl(0.1).after(60.0, 10) == FixedKl(0.1)


def test_answers_are_judged_by_their_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    found = group_advantages(rewards, 4, eps=0.0)
    assert torch.allclose(found.advantages[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    assert int(found.alike) == 1
    assert torch.allclose(group_advantages(rewards, 4, spread="none").advantages[:2], torch.tensor([0.75, -0.25]))
    others = group_advantages(rewards, 4, baseline="others", spread="none").advantages
    assert torch.allclose(others[:2], torch.tensor([1.0, -1 / 3]))


def test_an_answer_without_a_reward_is_left_out_of_its_group() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.0, math.inf, math.nan, 3.0, math.nan, math.nan])
    found = group_advantages(rewards, 4, spread="none")
    assert torch.allclose(found.advantages, torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert found.known.tolist() == [True, False, True, False, False, True, False, False]
    assert bool(group_advantages(rewards, 4).advantages.isfinite().all())


def test_answers_or_tokens_count_the_same() -> None:
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    zeros, ahead = torch.zeros(2, 4), torch.tensor([1.0, -2.0])
    losses = {
        weighting: float(grpo_loss(zeros, zeros, ahead, mask, weighting=weighting, longest=8).loss.mean())  # type: ignore[arg-type]
        for weighting in ("answer", "token", "length")
    }
    assert losses == pytest.approx({"answer": (-1 + 2) / 2, "token": (-4 + 2) / 5, "length": (-4 + 2) / 16})


def test_leaving_the_reference_costs() -> None:
    logprobs, reference, mask = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4)
    plain = grpo_loss(logprobs, logprobs, torch.zeros(3), mask, weighting="token")
    held = grpo_loss(logprobs, logprobs, torch.zeros(3), mask, weighting="token", reference=reference, beta=0.3)
    divergence = kl_estimate(logprobs, reference, "k3").mean()
    assert float(held.loss.mean() - plain.loss.mean()) == pytest.approx(float(0.3 * divergence), rel=1e-5)
    assert float(held.kl / held.tokens) == pytest.approx(float(divergence), rel=1e-5)
