"""Front ends of other frameworks do not make the host wait for a device that has yet to tell how a step went.

The device is this CPU, made to decide by itself; a clock notes when the host asks it for numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import plait.frontends.deepspeed as deepspeed
from plait.engine import update
from plait.engine.update import AsyncHostCopy
from plait.frontends.accelerate import Accelerator
from plait.frontends.mmengine.logging import HistoryBuffer, MessageHub

pytestmark = pytest.mark.usefixtures("no_group_left")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the host has waited for."""
    noted: list[int] = []

    class Noted(AsyncHostCopy):
        made = 0

        def __init__(self, numbers: Sequence[Tensor | float], device: torch.device) -> None:
            super().__init__(numbers, device)
            self.step, Noted.made = Noted.made, Noted.made + 1

        def read(self) -> list[float]:
            noted.append(self.step)
            return super().read()

    monkeypatch.setattr(update, "AsyncHostCopy", Noted)
    return noted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randint(3, (4,))


def deepspeed_engine(*, late: bool = True, torchs: bool = False, **config: Any) -> Any:
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        **config,
    }
    own = (lambda optimizer: StepLR(optimizer, 1, 0.5)) if torchs else None
    engine = deepspeed.initialize(model=Net(), lr_scheduler=own, config=settings)[0]
    engine._native.updater.stays_on_device = late
    return engine


def step(engine: Any, factor: float = 1.0) -> None:
    engine.backward(engine(*batch()) * factor)
    engine.step()


def test_deepspeeds_loop_waits_for_the_step_before_and_no_other(waits: list[int]) -> None:
    engine = deepspeed_engine()
    for _ in range(3):
        step(engine)
    assert waits == [0, 1]
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() > 0
    assert waits == [0, 1, 2]


@pytest.mark.parametrize("torchs", [False, True])
def test_every_update_has_the_rate_that_it_would_have_had(torchs: bool, tmp_path: Path) -> None:
    factors = [1.0, float("nan"), 1.0, float("nan"), float("nan"), 1.0]
    found = []
    for late in (True, False):
        engine = deepspeed_engine(late=late, torchs=torchs)
        updates: list[float] = []
        engine._native.updater._update = lambda engine=engine, updates=updates, own=engine._native.updater._update: (
            updates.append(engine.optimizer.param_groups[0]["lr"]),
            own(),
        )
        after = []
        for index, factor in enumerate(factors):
            step(engine, factor)
            if index != 3:  # the next step looks itself
                after.append((engine.get_lr(), engine.lr_scheduler.get_last_lr(), engine.skipped_steps))
        assert engine.skipped_steps == 3
        used = updates if not late else [rate for rate, one in zip(updates, factors, strict=True) if one == one]
        found.append((after, used))
    assert found[0] == found[1]


def test_what_is_saved_and_drawn_is_what_became_of_the_step(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    engine = deepspeed_engine(csv_monitor=monitor)
    step(engine)
    step(engine, float("nan"))
    rates = engine.get_lr()
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    step(engine)
    engine.destroy()
    rows = [row.split(",") for row in (tmp_path / "mine" / "train.csv").read_text().splitlines()]
    drawn = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["step"] for row in drawn] == ["1", "2", "3"]
    assert [row["loss"] == "nan" for row in drawn] == [False, True, False]
    assert drawn[0]["lr"] == drawn[1]["lr"] != drawn[2]["lr"]
    engine.load_checkpoint(tmp_path / "saved", tag="one")
    assert (engine.get_lr(), engine.global_steps, engine.skipped_steps) == (rates, 2, 1)


def test_a_prepared_scheduler_steps_without_waiting(waits: list[int]) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    prepared = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, 0.5))
    prepared[1].engine.updater.stays_on_device = True
    for factor in (1.0, float("nan"), 1.0):
        accelerator.backward(prepared[0](*batch()) * factor)
        prepared[1].step()
        prepared[2].step()
        prepared[1].zero_grad()
    assert waits == [0, 1]
    assert not prepared[1].step_was_skipped
    assert prepared[2].get_last_lr() == [0.125]


class Unseen(TorchDispatchMode):
    """Whoever makes a number of a tensor on the device would have to wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host looked"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("late", [True, False], ids=["the device decides", "the host decides"])
def test_clipping_gives_torchs_norm_and_torchs_update_without_a_look_at_it(waits: list[int], late: bool) -> None:
    accelerator = Accelerator(cpu=True)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    model, optimizer = accelerator.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=0.1, eps=1e-3))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, eps=1e-3)
    optimizer.engine.updater.stays_on_device = late
    for most in (1e-3, 0.3, 1e3, float("inf")):
        inputs = batch()
        with Unseen() if late else nullcontext():
            accelerator.backward(model(*inputs))
            norm = accelerator.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            optimizer.zero_grad()
        theirs(*inputs).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), most)
        plain.step()
        plain.zero_grad()
        assert isinstance(norm, Tensor)
        torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)
    assert waits == ([0, 1, 2] if late else [])


def test_a_norm_that_was_asked_for_is_not_taken_for_one_of_later_gradients() -> None:
    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = net.layer.weight.detach().clone()
    inputs = batch()
    accelerator.backward(model(*inputs))
    first = accelerator.clip_grad_norm_(model.parameters(), 1e-4)
    accelerator.backward(model(*inputs) * 9)
    second = accelerator.clip_grad_norm_(model.parameters(), 1e-4)
    torch.testing.assert_close(second, 10 * first)
    optimizer.step()
    assert (net.layer.weight - before).norm() < 1.1e-4


def test_a_history_asks_for_a_number_when_the_next_one_comes_or_somebody_looks() -> None:
    asked: list[float] = []

    def coming(number: float) -> Any:
        return lambda: asked.append(number) or number

    history = HistoryBuffer()
    for number in (1.0, 2.0, 3.0):
        history.update(coming(number))
    assert asked == [1.0, 2.0]
    assert history.mean(2) == 2.5
    hub = MessageHub("one")
    hub.update_scalar("loss", coming(7.0))
    hub.update_scalar("loss", torch.tensor([8.0]))
    hub.update_scalar("loss", coming(9.0))
    assert asked == [1.0, 2.0, 3.0, 7.0]
    assert hub.state_dict()["log_scalars"] == {"loss": [[7.0, 8.0, 9.0], [1, 1, 1]]}
    assert hub.get_scalar("loss").current() == 9.0
