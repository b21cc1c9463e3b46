"""Gradient norms and clipping, in one process."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.optim import clip, clip_by_value, grad_norm
from plait.optim.clip import tensor_norms


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


def test_norms_of_mixed_formats_come_in_order_and_each_is_exact() -> None:
    formats = (torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.bfloat16)
    tensors = [torch.randn(5, 7).to(dtype) for dtype in random.choices(formats, k=12)]
    norms = tensor_norms(tensors)
    for tensor, norm in zip(tensors, norms, strict=True):
        assert norm.dtype == torch.promote_types(tensor.dtype, torch.float32)
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-6)
    assert tensor_norms([]) == []


def test_norms_of_mixed_formats_take_one_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[set[torch.dtype]] = []
    plain = clip.foreach_norm

    def counted(tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        calls.append({tensor.dtype for tensor in tensors})
        return plain(tensors, *args, **kwargs)

    monkeypatch.setattr(clip, "foreach_norm", counted)
    tensor_norms([torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 20])
    assert calls == [{torch.float32}, {torch.bfloat16}]
