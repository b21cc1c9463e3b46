"""A loop of the user's own, with an optimizer and a scheduler of the user's own: as plain torch does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import ManualEngine, Preparation, prepare_manual
from plait.errors import ModelError, TrainingError
from tests.multi.ranks import RankPool
from tests.refusals import missing, refused


class Normalized(Optimizer):
    """Looks at a whole parameter: each moves by a length of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / (param.grad.norm() + 1e-3), alpha=group["lr"])


STAGES = ["zero0", "zero1", "zero2", "zero3"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=1e-2, eps=0.1),
    "SGD": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "a class that nobody knows": lambda params: Normalized(params, {"lr": 1e-2}),
}
STEPS, ACCUMULATION, RANKS = 4, 2, 2


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 1))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, with rates of their own."""
    weights = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim == 1]
    return [{"params": weights}, {"params": biases, "lr": 3e-2}]


def in_plain_torch(kind: str, data: Tensor, clip: float | None) -> tuple[list[float], list[float], list[Tensor]]:
    model = make_model()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    losses, norms = [], []
    for step in data:
        loss = torch.stack([model(batch).square().mean() for batch in step]).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, [param.detach() for param in model.parameters()]


def by_hand(rank: int, size: int, kind: str, sections: dict[str, Any], data: Tensor, clip: float | None) -> Any:
    config = parse_sections(**sections).config
    model = make_model()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    engine = prepare_manual(
        Preparation(
            config, open_world(config), model=model, optimizer=optimizer, accumulation=ACCUMULATION, log=lambda _: None
        )
    )
    assert engine.optimizer is optimizer
    losses, norms = [], []
    for step in data:
        for batch in step[rank::size]:
            engine.backward(engine.forward(batch).square().mean())
        if clip is not None:
            engine.clip_grad_norm(clip)
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        scheduler.step()
    with torch.no_grad():
        engine.forward(data[0, 0])
    return losses, norms, [whole(param) for param in engine.model.parameters()]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_users_optimizer_and_scheduler_go_on_working_at_every_stage(two_ranks: RankPool, kind: str) -> None:
    data = torch.randn(STEPS, ACCUMULATION * RANKS, 3, 7)
    for clip in (None, 0.05):
        losses, norms, params = in_plain_torch(kind, data, clip)
        for stage in STAGES:
            found = two_ranks.run(by_hand, kind, {"strategy": stage}, data, clip)
            mean = torch.tensor([each[0] for each in found]).mean(0)
            torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-7)
            for _, found_norms, found_params in found:
                torch.testing.assert_close(torch.tensor(found_norms), torch.tensor(norms), rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(found_params, params, rtol=1e-5, atol=1e-6)


def test_sixteen_bits_train_the_fp32_weights_behind_them(two_ranks: RankPool) -> None:
    data = torch.randn(STEPS, ACCUMULATION * RANKS, 3, 7)
    losses, _, _ = in_plain_torch("AdamW", data, None)
    for stage in STAGES:
        found = two_ranks.run(by_hand, "AdamW", {"strategy": stage, "precision": "bf16"}, data, None)
        mean = torch.tensor([each[0] for each in found]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=5e-2, atol=1e-3)


def one_process(**arguments: Any) -> ManualEngine:
    config = parse_sections().config
    return prepare_manual(
        Preparation(config, open_world(config), log=arguments.pop("say", lambda _: None), **arguments)
    )


def test_what_makes_an_optimizer_is_called_with_the_models_parameters() -> None:
    engine = one_process(model=make_model(), optimizer=lambda params: SGD(params, lr=0.5))
    before = copy.deepcopy(engine.model.state_dict())
    engine.backward(engine.forward(torch.randn(3, 7)).mean())
    engine.step()
    assert type(engine.optimizer) is SGD
    assert any(not torch.equal(before[name], param) for name, param in engine.model.named_parameters())


def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are() -> None:
    model, said = make_model(), []
    engine = one_process(model=model, optimizer=SGD(list(model.parameters())[:2], lr=0.5), say=said.append)
    assert not missing(said[0], "4 ", "optimizer", "2.bias")
    assert engine.frozen() == {"2.weight", "2.bias", "4.weight", "4.bias"}


def test_an_optimizer_of_another_model_is_an_error() -> None:
    with refused(ModelError, "optimizer", tuple(next(make_model().parameters()).shape)):
        one_process(model=make_model(), optimizer=SGD(make_model().parameters(), lr=0.5))


def test_an_optimizer_that_has_stepped_already_is_an_error() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    model(torch.randn(2, 7)).mean().backward()
    optimizer.step()
    with refused(ModelError, "AdamW", "state"):
        one_process(model=model, optimizer=optimizer)


def too_often(rank: int, size: int) -> str:
    config = parse_sections().config
    engine = prepare_manual(Preparation(config, open_world(config), model=make_model()))
    engine.backward(engine.forward(torch.randn(3, 7)).mean())
    with pytest.raises(TrainingError) as caught:
        engine.backward(engine.forward(torch.randn(3, 7)).mean())
    return str(caught.value)


def test_a_backward_pass_after_the_last_one_is_an_error_not_a_wrong_sum(two_ranks: RankPool) -> None:
    for message in two_ranks.run(too_often):
        assert not missing(message, "backward", "accumulate")


def test_a_step_without_gradients_is_an_error() -> None:
    with refused(TrainingError, "step", "backward"):
        one_process(model=make_model()).step()
