"""One process: the engine's step, its guard, and the loop that people keep themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn

import plait
from plait.config import parse_sections
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.engine.native import NativeEngine
from plait.errors import ConfigError, ModelError, NonFiniteError, TrainingError
from plait.models import LossTerm


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> LossTerm:
        error = (self.last(self.norm(self.inlet(x)).tanh()).squeeze(-1) - y).square()
        return LossTerm(error.sum(), error.numel())


def batch(rows: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows)}


def broken(rows: int = 3) -> dict[str, Tensor]:
    return {"x": torch.full((rows, 4), float("inf")), "y": torch.zeros(rows)}


def engine_of(model: Any = None, said: list[str] | None = None, loss_fn: Any = None, **sections: Any) -> NativeEngine:
    sections = {"optim": {"type": "SGD", "lr": 0.1}, "device": "cpu", **sections}
    config = parse_sections(**sections).config
    say = said.append if said is not None else lambda _text: None
    return prepare_native(Preparation(config, open_world(config), model=model or Net(), loss_function=loss_fn, log=say))


def weights(engine: NativeEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_tensors().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- a step


def test_a_step_is_that_of_plain_torch() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    engine = engine_of(model, optim={"type": "SGD", "lr": 0.1, "momentum": 0.9}, train={"clip_norm": 0.3})
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        parts = [batch(2), batch(5), batch(1)]
        result = engine.train_step(parts)
        terms = [twin(**part) for part in parts]
        loss = sum(t.sum for t in terms) / sum(t.count for t in terms)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert (result.targets, result.skipped, result.lr) == (8, False, 0.1)
    for name, param in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-4, atol=1e-6)


def test_clip_value_cuts_every_element_of_the_mean_gradient() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    part = batch(6)
    result = engine_of(model, train={"clip_value": 0.01}).train_step([part])
    twin(**part).mean().backward()
    norm = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)  # before clipping
    for name, param in twin.named_parameters():
        assert param.grad is not None
        expected = param - 0.1 * param.grad.clamp(-0.01, 0.01)
        torch.testing.assert_close(model.get_parameter(name), expected)


def test_inputs_are_given_as_keywords_positions_or_alone() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
            return (self.scale * a).mean() + (0.0 if b is None else b.mean())

    one, two = torch.ones(2), torch.full((2,), 2.0)
    engine = engine_of(Sum(), optim={"type": "SGD", "lr": 1e-9})
    for inputs in ({"a": one, "b": two}, (one, two), [one, two]):
        assert engine.train_step([inputs]).loss == pytest.approx(3.0)
    assert engine.train_step([one]).loss == pytest.approx(1.0)
    assert engine.train_step([MicroBatch(one, 7)]).targets == 7


def test_what_a_model_does_not_take_is_named_with_what_to_do() -> None:
    engine = engine_of()
    with refused(ModelError, "Net.forward", "x, y", "z", "`model_inputs`"):
        engine.train_step([batch() | {"z": torch.zeros(3)}])
    with refused(ModelError, "Net.forward", "positions, document_ids", "`data.document_mask: false`"):
        engine.train_step([batch() | {"positions": torch.zeros(3), "document_ids": torch.zeros(3)}])
    with refused(ModelError, "Net.forward", "x, y", "'y'", "def forward(self, x, y)", "loss_fn"):
        engine.train_step([{"x": torch.randn(3, 4)}])


def test_a_row_of_values_that_a_model_does_not_take_is_named_with_what_to_write() -> None:
    class Plain(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.ndim == 3:
                raise TypeError("of the model's own")
            return super().forward(x).square().mean()

    engine = engine_of(Plain(4, 2))
    with refused(ModelError, "Plain.forward", "2 values", "def forward(self, x, y)", "loss_fn"):
        engine.train_step([(torch.randn(3, 4), torch.zeros(3))])
    with pytest.raises(TypeError, match="of the model's own"):
        engine.train_step([torch.randn(1, 3, 4)])


def test_a_row_of_layers_is_given_the_first_input_as_in_a_pipeline() -> None:
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    row = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
    expected = float((row(x) - y).square().mean().detach())

    def of_pair(answer: Tensor, inputs: Any) -> Tensor:
        target = inputs["y"] if isinstance(inputs, dict) else inputs[1]
        return (answer - target).square().mean()

    engine = engine_of(row, optim={"type": "SGD", "lr": 1e-12}, loss_fn=of_pair)
    for inputs in ((x, y), [x, y], {"x": x, "y": y}):
        assert engine.train_step([inputs]).loss == pytest.approx(expected)
        assert engine.evaluate_micro_batch(inputs).loss_sum == pytest.approx(expected)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with refused(ModelError, "requires_grad=False"):
        engine_of(Net().requires_grad_(False))


def test_names_that_a_model_has_for_itself_mean_nothing_to_the_engine() -> None:
    model = Net()
    model.parts = 3
    assert engine_of(model).train_step([batch()]).targets == 3.0


def test_a_step_of_nothing_is_refused() -> None:
    with refused(TrainingError, "train_step", "micro-batch"):
        engine_of().train_step([])


def test_a_parameter_that_takes_no_part_has_a_gradient_of_zero() -> None:
    model = Net()
    model.idle = nn.Linear(3, 3)  # type: ignore[assignment]
    before = model.get_parameter("idle.weight").detach().clone()
    engine = engine_of(model, optim={"type": "AdamW", "lr": 0.1, "weight_decay": 0.5})
    engine.train_step([batch()])
    torch.testing.assert_close(model.get_parameter("idle.weight"), before * (1 - 0.1 * 0.5))  # decayed, not moved


def test_request_stop_is_answered_by_the_step_in_progress() -> None:
    engine = engine_of()
    assert engine.train_step([batch()]).stop is False
    engine.request_stop()
    assert engine.train_step([batch()]).stop is True
    assert engine.train_step([batch(), batch()]).stop is False


def test_which_steps_overflow_in_fp16_does_not_depend_on_how_a_batch_is_cut() -> None:
    """Nor on how many targets the first micro-batch of the run has, from which nothing can be guessed here."""

    class Weighted(Net):
        def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> LossTerm:  # type: ignore[override]
            error = (self.last(self.norm(self.inlet(x)).tanh()).squeeze(-1) - y).square()
            return LossTerm((error * weight).sum(), weight.sum())

    model, rows = Weighted(), {**batch(16), "weight": torch.tensor([0.0] * 8 + [1.0] * 8)}
    parts = [{name: tensor[start : start + 8] for name, tensor in rows.items()} for start in (0, 8)]
    found = []
    for micro_batches in ([rows], parts):
        engine = engine_of(copy.deepcopy(model), precision={"compute": "fp16", "scaler": {"initial_power": 24}})
        results = [engine.train_step([MicroBatch(each, 8) for each in micro_batches]) for _ in range(20)]
        found.append(([result.skipped for result in results], engine.state()))
    assert found[0] == found[1]
    assert True in found[0][0]


# ---- precision


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_weights_are_kept_in_fp32_and_computed_with_in_less(compute: str) -> None:
    model = Net()
    engine = engine_of(model, precision=compute)
    engine.train_step([batch()])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    assert model.inlet.weight.dtype == dtype
    master = engine.state_tensors()["model.inlet.weight"]
    assert master.dtype == torch.float32
    assert torch.equal(model.inlet.weight, master.to(dtype))


def test_without_master_weights_the_weights_themselves_are_small() -> None:
    engine = engine_of(precision={"compute": "bf16", "master": False}, optim={"type": "AdamW", "lr": 0.01})
    engine.train_step([batch(), batch()])
    assert {t.dtype for n, t in engine.state_tensors().items() if "step" not in n} == {torch.bfloat16}


def test_frozen_weights_are_stored_as_they_were_whatever_they_are_computed_with() -> None:
    model = Net()
    model.inlet.requires_grad_(False)
    before = model.inlet.weight.detach().clone()
    engine = engine_of(model, precision="bf16")
    engine.train_step([batch()])
    assert model.inlet.weight.dtype == torch.bfloat16
    stored = engine.state_tensors()["model.inlet.weight"]
    assert torch.equal(stored, before)
    stored.fill_(0.25)  # as loading a checkpoint does
    engine.state_loaded()
    assert torch.equal(model.inlet.weight, torch.full_like(model.inlet.weight, 0.25))


def test_small_sums_lose_what_fp32_sums_keep() -> None:
    """`reduce` is the format of sums over micro-batches: 256 + 1 is 256 in bf16."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> LossTerm:
            return LossTerm(self.w * x, 1)

    parts = [torch.tensor(256.0)] + [torch.tensor(1.0)] * 7
    for reduce, total in (("fp32", 263.0), ("bf16", 256.0)):
        engine = engine_of(Slope(), precision={"compute": "bf16", "reduce": reduce})
        assert engine.train_step(parts).grad_norm == pytest.approx(total / 8)


def test_a_halving_scale_skips_without_moving_anything() -> None:
    scaler = {"initial_power": 3, "hysteresis": 2, "window": 100}
    engine = engine_of(precision={"compute": "fp16", "scaler": scaler}, optim={"type": "AdamW", "lr": 0.1})
    engine.train_step([batch()])
    before = weights(engine)
    seen = []
    for _ in range(4):
        result = engine.train_step([broken()])
        assert result.skipped
        seen.append(engine.updater.scaler.scale if engine.updater.scaler else None)
    assert seen == [8.0, 4.0, 2.0, 1.0]
    assert same(weights(engine), before)
    assert not engine.train_step([batch()]).skipped
    assert engine.steps == 6


def test_searching_for_a_scale_does_not_count_as_failing() -> None:
    scaler = {"initial_power": 32, "hysteresis": 1}
    engine = engine_of(precision={"compute": "fp16", "scaler": scaler}, train={"guard": {"max_skips": 3}})
    for _ in range(31):
        assert engine.train_step([broken()]).skipped
    for _ in range(2):  # at the smallest scale there is nothing left to search
        assert engine.train_step([broken()]).skipped
    with refused(NonFiniteError, "3 steps", "loss scale 1;", "inlet"):
        engine.train_step([broken()])


# ---- the guard


def test_a_bad_step_is_skipped_and_its_first_bad_module_named() -> None:
    said: list[str] = []
    engine = engine_of(said=said, optim={"type": "AdamW", "lr": 0.1})
    engine.train_step([batch()])
    before = weights(engine)
    result = engine.train_step([broken()])
    assert result.skipped
    assert not torch.tensor(result.grad_norm).isfinite()
    assert same(weights(engine), before)
    assert len(said) == 1
    assert not missing(said[0], "step 1", "output", "inlet")


def test_a_gradient_that_is_not_finite_is_traced_to_its_parameter() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.early(x) * 0 + self.late(x * 0).sum() * 0).abs().sqrt().sum()  # slope of √0: infinite

    said: list[str] = []
    assert engine_of(Root(), said=said).train_step([torch.ones(1, 2)]).skipped
    assert not missing(said[0], "step 0", "gradient", "late.bias")


def test_a_loss_that_is_not_finite_skips_although_its_gradients_are() -> None:
    said: list[str] = []
    engine = engine_of(said=said, loss_fn=lambda out, _batch: out.mean() + float("inf"))
    before = weights(engine)
    for parts in ([batch()], [batch(), batch()]):
        assert engine.train_step(parts).skipped
    assert same(weights(engine), before)
    assert not missing(said[0], "step 0", "loss")
    assert missing(said[0], "inlet", "last") == ["inlet", "last"]


def test_too_many_bad_steps_in_a_row_end_the_run() -> None:
    engine = engine_of(train={"guard": {"max_skips": 3}})
    for _ in range(2):
        assert engine.train_step([broken()]).skipped
    assert not engine.train_step([batch()]).skipped  # a good one: the count begins anew
    for _ in range(2):
        assert engine.train_step([broken()]).skipped
    with refused(NonFiniteError, "3 steps", "output", "inlet", "train.guard.max_skips"):
        engine.train_step([broken()])


def test_the_count_of_bad_steps_survives_a_restart() -> None:
    engine = engine_of(train={"guard": {"max_skips": 2}})
    engine.train_step([broken()])
    other = engine_of(train={"guard": {"max_skips": 2}})
    other.restore(engine.state())
    with pytest.raises(NonFiniteError):
        other.train_step([broken()])


def test_without_the_guard_nothing_is_skipped() -> None:
    engine = engine_of(train={"guard": {"enabled": False}})
    assert not engine.train_step([broken()]).skipped
    assert not all(bool(t.isfinite().all()) for t in weights(engine).values())


# ---- loops of one's own


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loop_of_ones_own_equals_train_step(accumulation: int, precision: str) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    sections: dict[str, Any] = {"optim": {"type": "AdamW", "lr": 0.05}, "precision": precision, "clip_norm": 0.5}
    mine = plait.prepare(model, accumulation=accumulation, device="cpu", **sections)
    theirs = plait.prepare(twin, accumulation=accumulation, device="cpu", **sections)
    for _ in range(3):
        parts = [batch(int(torch.randint(1, 6, ()))) for _ in range(accumulation)]
        for index, part in enumerate(parts):
            loss = mine(part)
            assert loss.requires_grad
            mine.backward(loss)
            result = mine.step()
            assert (result is None) == (index < accumulation - 1)
        expected = theirs.train_step(parts)
        assert result is not None
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.skipped == expected.skipped  # an fp16 run begins with a search for its scale
        rel = 1e-5 if precision == "fp32" else 1e-2
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=rel, nan_ok=True)
    for name, tensor in theirs.state_tensors().items():
        atol = 1e-6 if precision == "fp32" else 1e-2
        torch.testing.assert_close(mine.state_tensors()[name], tensor, rtol=1e-3, atol=atol)


def test_a_loss_made_from_the_engines_loss_can_be_trained_on() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    part = batch()
    engine = plait.prepare(model, optim={"type": "SGD", "lr": 0.1}, device="cpu")
    engine.backward(engine(part) + 0.5 * model.last.weight.square().sum())
    engine.step()
    (twin(**part).mean() + 0.5 * twin.last.weight.square().sum()).backward()
    assert twin.last.weight.grad is not None
    torch.testing.assert_close(model.last.weight, twin.last.weight - 0.1 * twin.last.weight.grad)


def test_calls_in_the_wrong_order_are_refused() -> None:
    engine = plait.prepare(Net(), accumulation=2, device="cpu")
    with refused(TrainingError, "engine.step()", "engine.backward(loss)"):
        engine.step()
    with refused(TrainingError, "engine.backward(loss)", "engine(batch)"):
        engine.backward(torch.zeros((), requires_grad=True))
    loss = engine(batch())
    with refused(TrainingError, "engine(batch)", "engine.backward(loss)", "engine.evaluate_micro_batch(batch)"):
        engine(batch())
    engine.backward(loss)
    assert engine.step() is None
    engine.backward(engine(batch()))
    with refused(TrainingError, "2 micro-batches", "`accumulation`", "engine.step()"):
        engine(batch())
    assert engine.step() is not None


def test_evaluation_sees_no_dropout_trains_nothing_and_leaves_the_mode() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor, y: Tensor) -> LossTerm:
            return super().forward(nn.functional.dropout(x, 0.5, self.training), y)

    engine = engine_of(Noisy())
    before = weights(engine)
    part = batch(8)
    answers = [engine.evaluate_micro_batch(MicroBatch(part, 8)) for _ in range(2)]
    assert answers[0].loss_sum == answers[1].loss_sum
    assert answers[0].loss_count == 8
    assert not answers[0].outputs.sum.requires_grad
    assert engine.model.training
    assert same(weights(engine), before)
    assert engine.evaluate_micro_batch(MicroBatch(part, 0)).loss_count == 0


def test_prepare_refuses_contradictions_as_a_run_does() -> None:
    with refused(ConfigError, "1", "`strategy.zero: 3`", key="strategy.forward_prefetch"):
        plait.prepare(Net(), strategy={"zero": 0, "forward_prefetch": 1}, device="cpu")
    with refused(ConfigError, "'AdamWW'", "`AdamW`", key="optim.type"):
        plait.prepare(Net(), optim={"type": "AdamWW"}, device="cpu")


def test_prepare_takes_a_function_that_makes_the_model() -> None:
    engine = plait.prepare(Net, seed=3, device="cpu")
    again = plait.prepare(Net, seed=3, device="cpu")
    assert torch.equal(engine.model.get_parameter("inlet.weight"), again.model.get_parameter("inlet.weight"))
