"""Gradient norms and clipping, in one process."""

from __future__ import annotations

import pytest
import torch

from plait.optim import NormPart, clip_by_norm, clip_by_value, grad_norm


def test_the_norm_is_that_of_all_tensors_as_one() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    expected = torch.cat([t.flatten() for t in tensors]).norm()
    torch.testing.assert_close(grad_norm([NormPart(tensors)]), expected)
    torch.testing.assert_close(grad_norm([NormPart(tensors[:1]), NormPart(tensors[1:])]), expected)


def test_half_precision_gradients_are_summed_in_fp32() -> None:
    gradient = torch.full((1000,), 60000.0, dtype=torch.float16)
    norm = grad_norm([NormPart([gradient])])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, gradient.float().norm())


def test_fp64_gradients_keep_their_precision() -> None:
    tensors = [torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    norm = grad_norm([NormPart(tensors)])
    torch.testing.assert_close(norm, torch.cat(tensors).norm(), rtol=1e-14, atol=0)


def test_empty_tensors_and_parts_count_nothing() -> None:
    gradient = torch.randn(4)
    norm = grad_norm([NormPart([torch.zeros(0), gradient]), NormPart([])])
    torch.testing.assert_close(norm, gradient.norm())
    assert grad_norm([NormPart([])]) == 0
    assert grad_norm([]) == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_gradient_shows_in_the_norm(bad: float) -> None:
    assert not torch.isfinite(grad_norm([NormPart([torch.tensor([1.0, bad])])]))


def test_gradients_are_not_changed_by_measuring() -> None:
    gradient = torch.randn(1)
    before = gradient.clone()
    grad_norm([NormPart([gradient]), NormPart([gradient])])
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_by_norm_is_that_of_torch(limit: float) -> None:
    params = [torch.zeros(3, 4, requires_grad=True), torch.zeros(5, requires_grad=True)]
    ours = [torch.randn_like(p) for p in params]
    for p, gradient in zip(params, ours, strict=True):
        p.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(params, limit)
    clip_by_norm(ours, grad_norm([NormPart(ours)]), limit)
    torch.testing.assert_close(ours, [p.grad for p in params])


def test_clipping_by_value_cuts_each_element() -> None:
    gradients = [torch.tensor([-3.0, 0.5]), torch.tensor([2.0]), torch.zeros(0)]
    clip_by_value(gradients, 1.0)
    assert [g.tolist() for g in gradients] == [[-1.0, 0.5], [1.0], []]
    clip_by_value([], 1.0)
