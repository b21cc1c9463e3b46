"""The update that a device decides by itself, run on CPU: it must equal the one that the host decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.engine import StepResult, prepare


def train(on_device: bool, batches: list[list[tuple[Tensor]]], **sections: Any) -> tuple[list[StepResult], Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    engine: Any = prepare(model, loss_fn=lambda outputs, _: outputs.square().mean(), device="cpu", **sections)
    engine.updater.stays_on_device = on_device
    results = [engine.train_step(micro_batches) for micro_batches in batches]
    return results, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_both_give_the_same_weights_and_numbers(precision: str, clip_norm: float | None, micro_batches: int) -> None:
    batches = [[(torch.randn(5, 4),) for _ in range(micro_batches)] for _ in range(4)]
    sections = {"precision": precision, "clip_norm": clip_norm, "optim": {"type": "AdamW", "lr": 1e-2}}
    expected, weights = train(False, batches, **sections)
    found, found_weights = train(True, batches, **sections)
    torch.testing.assert_close(found_weights, weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.skipped == theirs.skipped
        assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-5, nan_ok=True)


def test_a_step_that_is_not_finite_is_skipped_by_the_kernel() -> None:
    batches = [[(torch.randn(5, 4),)], [(torch.full((5, 4), float("inf")),)]]
    (_, bad), weights = train(True, batches)
    _, before = train(True, batches[:1])
    assert bad.skipped
    torch.testing.assert_close(weights, before, rtol=0, atol=0)
