"""Numbers that come a step later: a device decides, the host hears of it when the next step is under way.

The device is this CPU, made to decide by itself; a clock notes when the host asks it for numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, StepResult, prepare_manual, prepare_native, update
from plait.engine.update import AsyncHostCopy
from plait.errors import NonFiniteError
from plait.models import LossTerm, build_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> LossTerm:
        error = self.last(self.inlet(x).tanh()).square()
        return LossTerm(error.sum(), error.numel())


def engine_of(said: list[str] | None = None, model: Any = None, prepare: Any = prepare_native, **sections: Any) -> Any:
    torch.manual_seed(3)
    config = parse_sections(**{"optim": {"type": "AdamW", "lr": 0.01}, "device": "cpu", **sections}).config
    say = said.append if said is not None else lambda _text: None
    engine = prepare(Preparation(config, open_world(config), model=model or Net(), log=say))
    engine.updater.stays_on_device = True
    return engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does, in its order: it queues the numbers of a step, or waits for them."""
    noted: list[str] = []

    class Noted(AsyncHostCopy):
        made = 0

        def __init__(self, numbers: Sequence[Tensor | float], device: torch.device) -> None:
            super().__init__(numbers, device)
            self.step, Noted.made = Noted.made, Noted.made + 1
            noted.append(f"queues {self.step}")

        def read(self) -> list[float]:
            noted.append(f"waits for {self.step}")
            return super().read()

    monkeypatch.setattr(update, "AsyncHostCopy", Noted)
    return noted


def batch() -> tuple[Tensor]:
    return (torch.randn(3, 4),)


def broken() -> tuple[Tensor]:
    return (torch.full((3, 4), float("inf")),)


def test_the_host_is_one_step_ahead_and_no_more(clock: list[str]) -> None:
    engine = engine_of()
    for _ in range(3):
        engine.train_step([batch()])
    assert clock == ["queues 0", "queues 1", "waits for 0", "queues 2", "waits for 1"]
    engine.settle()
    assert clock[5:] == ["waits for 2"]


def test_who_looks_at_a_number_waits_once_and_gets_that_steps(clock: list[str]) -> None:
    engine, given = engine_of(), [batch() for _ in range(3)]
    results = [engine.train_step([one]) for one in given]
    assert all(result.asynchronous for result in results)
    plain = engine_of()
    plain.updater.stays_on_device = False
    for result, one in zip(results, given, strict=True):
        expected = plain.train_step([one])
        assert not expected.asynchronous
        assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
        assert (result.skipped, result.lr, result.targets, result.stop) == (False, expected.lr, 3.0, False)
    assert [line for line in clock if line.startswith("waits")] == ["waits for 0", "waits for 1", "waits for 2"]


def test_with_a_loss_scale_a_step_waits_for_itself(clock: list[str]) -> None:
    engine = engine_of(precision={"compute": "fp16", "scaler": {"initial_power": 4, "hysteresis": 1}})
    results = [engine.train_step([one]) for one in (batch(), broken(), batch())]
    assert [result.asynchronous for result in results] == [False] * 3
    assert [result.skipped for result in results] == [False, True, False]
    assert engine.updater.scaler.scale == 8.0
    assert clock[:2] == ["queues 0", "waits for 0"]


def test_a_skipped_step_is_reported_under_its_own_number_when_the_next_is_under_way() -> None:
    said: list[str] = []
    engine = engine_of(said)
    engine.train_step([batch()])
    engine.train_step([broken()])
    assert said == []
    engine.train_step([batch()])
    assert len(said) == 1
    assert not missing(said[0], "step 1", "output", "inlet")
    assert engine.state()["skips_in_a_row"] == 0


def test_a_bad_gradient_is_named_though_it_is_gone() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.scale * x).sqrt() + self.shift).sum()

    said: list[str] = []
    engine = engine_of(said, Rooted(), train={"clip_norm": None})
    assert engine.train_step([(torch.zeros(2),)]).skipped
    engine.train_step([(torch.zeros(2),)])
    assert len(said) == 1
    assert not missing(said[0], "step 0", "gradient", "scale")


def test_too_many_skipped_steps_end_a_run_one_step_later() -> None:
    engine = engine_of(train={"guard": {"max_skips": 2}})
    for one in (broken(), batch(), broken(), broken()):  # a good one in between: the count begins anew
        engine.train_step([one])
    with refused(NonFiniteError, "2 steps", "inlet", "train.guard.max_skips"):
        engine.train_step([batch()])


def test_what_is_saved_knows_of_every_step() -> None:
    said: list[str] = []
    engine = engine_of(said)
    engine.train_step([broken()])
    assert engine.state()["skips_in_a_row"] == 1
    assert len(said) == 1
    engine.settle()
    assert len(said) == 1


def test_a_request_to_stop_comes_with_the_step_that_it_was_made_for(clock: list[str]) -> None:
    engine = engine_of()
    first = engine.train_step([batch()])
    engine.request_stop()
    second, third = engine.train_step([batch()]), engine.train_step([batch()])
    assert [first.stop, second.stop, third.stop] == [False, True, False]


def test_a_loop_of_ones_own_hears_its_own_mean_later(clock: list[str]) -> None:
    engine = engine_of(model=nn.Linear(4, 1), prepare=prepare_manual)
    losses = []
    for _ in range(2):
        loss = engine.forward(*batch()).square().mean()
        losses.append(loss.detach())
        engine.backward(loss)
        result = engine.step()
    assert result.asynchronous
    assert clock == ["queues 0", "queues 1", "waits for 0"]
    assert result.loss == pytest.approx(float(losses[1]))


def test_routers_of_a_mixture_learn_of_a_skipped_step_on_the_device() -> None:
    section = {"vocab_size": 32, "dim": 16, "layers": 1, "heads": 2, "seq_len": 8, "experts": 4, "bias_rate": 0.1}
    model = build_model(parse_sections(model={"type": "moe", **section}).config.model)
    ids = torch.randint(32, (2, 8))
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]
    for updated in (False, True):
        before = [bias.clone() for bias in biases]
        model(ids, labels=ids).sum.backward()
        model.after_step(None, updated=torch.tensor(updated))
        same = all(torch.equal(bias, old) for bias, old in zip(biases, before, strict=True))
        assert same is not updated


def test_a_result_can_be_shown_and_sent_and_has_no_other_names() -> None:
    result = StepResult.deferred(0.1, lambda: (2.0, 3.0, False, 4.0, True))
    for one in (pickle.loads(pickle.dumps(result)), result):
        assert repr(one) == "StepResult(loss=2.0, grad_norm=3.0, skipped=False, lr=0.1, targets=4.0, stop=True)"
    with refused(AttributeError, "StepResult", "'los'"):
        result.los  # noqa: B018
