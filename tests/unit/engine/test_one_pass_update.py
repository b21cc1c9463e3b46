"""The update that also rounds the weights, in a whole engine: the same training as with torch's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.engine import prepare
from plait.engine.master_weights import RoundedParams
from plait.errors import ConfigError
from plait.optim.fused_adam import OnePassAdam


def engine_of(implementation: str, **sections: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optim = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "implementation": implementation}
    return prepare(model, loss_fn=lambda outputs, _: outputs.square().mean(), device="cpu", optim=optim, **sections)


def numbers_of(engine: Any) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in engine.state_tensors().values()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("train", [{}, {"clip_norm": 0.01}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_it_trains_as_the_other_does(
    precision: str, train: dict[str, float], micro_batches: int, accumulation: int
) -> None:
    one, other = (
        engine_of(word, precision=precision, accumulation=accumulation, **train) for word in ("one-pass", "fused")
    )
    one.updater.stays_on_device = other.updater.stays_on_device = micro_batches == 1
    assert isinstance(one.updater.optimizer, OnePassAdam)
    for _ in range(4):
        batches = [(torch.randn(5, 4),) for _ in range(micro_batches)]
        found, expected = one.train_step(batches), other.train_step(batches)
        assert (found.loss, found.grad_norm) == pytest.approx(
            (expected.loss, expected.grad_norm), rel=1e-4, nan_ok=True
        )
    torch.testing.assert_close(numbers_of(one), numbers_of(other), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_one_micro_batch_in_a_smaller_format_leaves_its_gradients_as_they_are() -> None:
    engine = engine_of("one-pass", precision="bf16")
    assert isinstance(engine.master_weights, RoundedParams)
    before = [p.detach().clone() for p in engine.model.parameters()]
    engine.backward(engine((torch.randn(5, 4),)))
    assert {gradient.dtype for gradient in engine.master_weights.gather_gradients()} == {torch.bfloat16}
    engine.step()
    for param, weight, then in zip(engine.model.parameters(), engine.master_weights.tensors, before, strict=True):
        assert torch.equal(param, weight.to(torch.bfloat16))
        assert not torch.equal(param, then)


@pytest.mark.parametrize(
    ("sections", "named"),
    [({"optim": {"type": "AdamW", "amsgrad": True}}, "amsgrad"), ({"strategy": {"offload": "cpu"}}, "offload")],
    ids=str,
)
def test_what_it_cannot_do_is_refused(sections: dict[str, Any], named: str) -> None:
    sections.setdefault("optim", {"type": "AdamW"})["implementation"] = "one-pass"
    with refused(ConfigError, "'one-pass'", named, "'auto'", key="optim.implementation"):
        prepare(torch.nn.Linear(4, 4), loss_fn=lambda outputs, _: outputs.square().mean(), device="cpu", **sections)
