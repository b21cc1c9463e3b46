"""Gradient norms and clipping, in one process."""

from __future__ import annotations

import math

import pytest
import torch

from plait.optim import clip_by_value, grad_norm


def test_the_norm_is_that_of_all_tensors_as_one() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    assert grad_norm(tensors) == pytest.approx(torch.cat([t.flatten() for t in tensors]).norm().item())


def test_half_precision_gradients_do_not_overflow_the_norm() -> None:
    gradient = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert grad_norm([gradient]) == pytest.approx(gradient.float().norm().item())


def test_fp64_gradients_keep_their_precision() -> None:
    tensors = [torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    assert grad_norm(tensors) == pytest.approx(torch.cat(tensors).norm().item(), rel=1e-14)


def test_empty_tensors_count_nothing() -> None:
    gradient = torch.randn(4)
    assert grad_norm([torch.zeros(0), gradient]) == pytest.approx(gradient.norm().item())
    assert grad_norm([]) == 0


def test_a_part_counts_as_much_as_its_weight_says() -> None:
    tensors = [torch.randn(3), torch.randn(5)]
    expected = (tensors[0].square().sum() / 4 + tensors[1].square().sum()).sqrt().item()
    assert grad_norm(tensors, weights=[0.25, 1.0]) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_gradient_shows_in_the_norm(bad: float) -> None:
    assert not math.isfinite(grad_norm([torch.tensor([1.0, bad]), torch.ones(3)]))


def test_clipping_by_value_cuts_each_element() -> None:
    gradients = [torch.tensor([-3.0, 0.5]), torch.tensor([2.0]), torch.zeros(0)]
    clip_by_value(gradients, 1.0)
    assert [g.tolist() for g in gradients] == [[-1.0, 0.5], [1.0], []]
    clip_by_value([], 1.0)
