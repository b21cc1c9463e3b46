"""From whatever a model returns to a loss with a weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.engine import prepare
from plait.engine.loss import LossNormalizer, WeightedLoss, read_loss
from plait.errors import ModelError
from plait.models import LossTerm


def read(outputs: Any, samples: int = 4, **options: Any) -> WeightedLoss:
    return read_loss(outputs, options.get("inputs"), samples, options.get("loss_fn"))


def test_a_loss_term_is_a_sum_and_brings_its_own_count() -> None:
    found = read(LossTerm(torch.tensor(6.0), torch.tensor(3)), samples=100)
    assert (float(found.total()), float(found.weight), float(found.mean())) == (6.0, 3.0, 2.0)


def test_a_scalar_is_a_mean_that_counts_as_often_as_there_are_samples() -> None:
    found = read(torch.tensor(2.0), samples=4)
    assert (float(found.total()), float(found.weight), float(found.mean())) == (8.0, 4.0, 2.0)


@pytest.mark.parametrize(
    "outputs",
    [
        {"loss": torch.tensor(2.0), "logits": torch.zeros(3)},
        SimpleNamespace(loss=torch.tensor(2.0)),
        {"loss": LossTerm(torch.tensor(8.0), 4)},
    ],
)
def test_the_loss_is_found_in_what_a_model_returns(outputs: Any) -> None:
    found = read(outputs)
    assert (float(found.mean()), float(found.weight)) == (2.0, 4.0)


def test_a_loss_function_gets_outputs_and_inputs() -> None:
    found = read(
        torch.tensor([1.0, 3.0]),
        inputs={"target": torch.tensor([0.0, 0.0])},
        loss_fn=lambda out, batch: (out - batch["target"]).square().mean(),
    )
    assert float(found.mean()) == 5.0


def test_the_answer_of_a_loss_function_is_read_like_a_models() -> None:
    assert float(read(None, loss_fn=lambda _o, _b: {"loss": LossTerm(torch.tensor(3.0), 2)}).mean()) == 1.5


@pytest.mark.parametrize("outputs", [torch.tensor(2.0), LossTerm(torch.tensor(2.0), torch.tensor(5))])
def test_a_filler_counts_for_nothing_and_keeps_its_graph(outputs: Any) -> None:
    weight = torch.ones((), requires_grad=True)
    scaled = outputs * weight if isinstance(outputs, Tensor) else outputs._replace(sum=outputs.sum * weight)
    found = read(scaled, samples=0)
    assert (found.total().item(), float(found.weight), found.mean().item()) == (0.0, 0.0, 0.0)
    found.value.backward()
    assert weight.grad is not None
    assert float(weight.grad) == 0.0


@pytest.mark.parametrize("count", [torch.tensor(0), 0, 0.0])
def test_no_targets_are_a_loss_of_zero(count: Any) -> None:
    assert float(read(LossTerm(torch.tensor(0.0), count)).mean()) == 0.0


@pytest.mark.parametrize("count", [torch.tensor(0.25), 0.25])
def test_a_count_may_be_a_fraction(count: Any) -> None:
    # Weighted targets need not add up to a whole number, nor to one.
    assert float(read(LossTerm(torch.tensor(0.5), count)).mean()) == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_a_small_format_is_scaled_in_fp32(dtype: torch.dtype) -> None:
    found = read(torch.tensor(3.0, dtype=dtype))
    assert found.value.dtype == torch.float32
    assert float(found.value * 2.0**16) == 3.0 * 2**16


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        (torch.zeros(2, 3), "(2, 3)"),
        (torch.zeros(1), "(1,)"),
        (LossTerm(torch.zeros(2), 2), "(2,)"),
        ((torch.zeros(()), torch.zeros(3)), "tuple"),
        (1.5, "float"),
        (None, "NoneType"),
        ({"logits": 1, "aux": 2}, "['aux', 'logits']"),
        (SimpleNamespace(loss=None), "SimpleNamespace"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(outputs: Any, named: str) -> None:
    with refused(ModelError, named, "loss", "loss_fn"):
        read(outputs)


# ---- the mean over micro-batches


def total_and_gradient(parts: list[WeightedLoss], weight: Tensor) -> tuple[float, float, float]:
    normalizer = LossNormalizer(None, torch.device("cpu"))
    for part in parts:
        normalizer.add(part, micro_batches=len(parts))
        normalizer.scaled(part).backward(retain_graph=True)
    sums = normalizer.finish()
    loss, count, _ = sums.read()
    assert weight.grad is not None
    return loss, count, float(weight.grad) * float(sums.correction())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_sums_are_divided_by_all_targets_of_the_step(parts: int) -> None:
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    sums = torch.rand(parts, dtype=torch.float64) * 9
    counts = torch.randint(1, 9, (parts,))
    terms = [read(LossTerm(s * weight, c)) for s, c in zip(sums, counts, strict=True)]
    loss, count, gradient = total_and_gradient(terms, weight)
    assert count == int(counts.sum())
    assert loss == pytest.approx(float(sums.sum() * 1.5 / counts.sum()))
    assert gradient == pytest.approx(float(sums.sum() / counts.sum()))


def test_means_are_weighted_by_their_samples() -> None:
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    terms = [read(value * weight, samples=n) for value, n in ((2.0, 1), (8.0, 5), (100.0, 0))]
    loss, count, gradient = total_and_gradient(terms, weight)
    assert (loss, count, gradient) == (pytest.approx(7.0), 6.0, pytest.approx(7.0))


def test_a_step_without_any_target_is_a_loss_of_zero() -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    for count in (1, 3):
        loss, targets, gradient = total_and_gradient([read(2.0 * weight, samples=0)] * count, weight)
        assert (loss, targets, gradient) == (0.0, 0.0, 0.0)


def test_a_flag_comes_back_once() -> None:
    for micro_batches in (1, 2):
        normalizer = LossNormalizer(None, torch.device("cpu"))
        flags = []
        for flag in (False, True, False):
            normalizer.flag = normalizer.flag or flag
            for _ in range(micro_batches):
                normalizer.add(read(torch.tensor(1.0)), micro_batches=micro_batches)
            flags.append(normalizer.finish().read()[2])
        assert flags == [False, True, False]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradients_are(micro_batches: int, value: float) -> None:
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    engine = prepare(model, loss_fn=lambda outputs, inputs: outputs.mean() + inputs[0].new_tensor(value), device="cpu")
    assert engine.train_step([(torch.ones(3, 2),)] * micro_batches).skipped
    assert torch.equal(model.weight, before)
