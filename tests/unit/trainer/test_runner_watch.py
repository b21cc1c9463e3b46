"""What a run says, and when it refuses to be called finished: skipped steps, spikes, nothing to learn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn

from plait import LossTerm, Runner
from plait.errors import DataError, ModelError, NonFiniteError

Losses = list[float]


class Told(nn.Module):
    """Its loss is what the data say; one of 0 targets where they say so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, loss: Tensor, count: Tensor) -> LossTerm:
        return LossTerm((self.weight * loss).sum(), count.sum())


def run(folder: Path, losses: Losses, *, late: bool = False, counts: Losses | None = None, **sections: Any) -> Runner:
    """One step for each loss, in the order of the list."""
    data = list(zip(torch.tensor(losses), torch.tensor(counts or [1.0] * len(losses)), strict=True))
    settings: dict[str, Any] = {
        "model": Told,
        "data": torch.utils.data.DataLoader(data, batch_size=1),
        "train": {"max_epochs": 1},
        "optim": {"type": "SGD", "lr": 1e-30},
        "work_dir": folder,
        "log": {"console": "none", "sinks": ["jsonl"], "every": 1},
        "plan": {"gate": "off"},
        "device": "cpu",
    }
    settings["train"] |= sections.pop("train", {})
    with Runner(**{**settings, **sections}) as runner:
        runner.setup()
        engine: Any = runner.engine
        engine.updater.stays_on_device = late
        runner.train()
    return runner


def messages(folder: Path, level: str = "warning") -> list[str]:
    lines = (folder / "events-rank0.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [one["data"]["text"] for one in found if one["kind"] == "message" and one["data"]["level"] == level]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


NAN = math.nan


@pytest.mark.parametrize("late", [False, True])
def test_a_run_whose_steps_are_nearly_all_skipped_fails_though_never_many_in_a_row(tmp_path: Path, late: bool) -> None:
    losses = [1.0 if step % 12 == 11 else NAN for step in range(45)]
    with refused(NonFiniteError, "21", "22 steps", "max_share"):
        run(tmp_path, losses, late=late)
    assert "NonFiniteError" in report(tmp_path)["reason"]
    assert report(tmp_path)["skipped"] >= 20


@pytest.mark.parametrize("late", [False, True])
def test_a_short_run_that_was_mostly_skipped_is_not_finished(tmp_path: Path, late: bool) -> None:
    with refused(NonFiniteError, "6", "8 steps"):
        run(tmp_path, [1.0, NAN, NAN, NAN, 1.0, NAN, NAN, NAN], late=late)


def test_accepted_skips_are_counted_at_the_end(tmp_path: Path) -> None:
    run(tmp_path, [1.0, NAN, 1.0, NAN, 1.0])
    assert report(tmp_path)["reason"] == "finished"
    assert report(tmp_path)["skipped"] == 2
    assert any(not missing(text, "2", "5 steps", "suspects.jsonl") for text in messages(tmp_path))


def test_another_share_may_be_accepted(tmp_path: Path) -> None:
    run(tmp_path, [NAN, NAN, NAN, 1.0], train={"guard": {"max_share": 0.75}})
    assert report(tmp_path)["skipped"] == 3


def test_skips_of_before_a_checkpoint_are_still_known_after_it(tmp_path: Path) -> None:
    guard = {"guard": {"window": 8, "max_share": 0.5}}
    losses = [1.0, NAN, 1.0, NAN, 1.0, NAN, NAN, NAN]
    run(tmp_path, losses, train={"stop_after": 6, **guard})
    with refused(NonFiniteError, "5", "8 steps"):
        run(tmp_path, losses, train=guard, checkpoint={"resume": "auto"})


def test_the_search_for_a_loss_scale_fails_no_run(tmp_path: Path) -> None:
    scaler = {"initial_power": 30, "hysteresis": 1}
    run(tmp_path, [1.0] * 24, precision={"compute": "fp16", "scaler": scaler})
    skipped = report(tmp_path)["skipped"]
    assert skipped > 12
    assert any(not missing(t, skipped, "24 steps", "scale") for t in messages(tmp_path, "info"))


@pytest.mark.parametrize("late", [False, True])
def test_a_spike_is_told_of_once_and_the_next_one_again(tmp_path: Path, late: bool) -> None:
    losses = [2.0 + 0.05 * math.sin(step) for step in range(40)]
    losses[20], losses[21], losses[30] = 1e12, 1e12, 50.0
    run(tmp_path, losses, late=late)
    spikes = [text for text in messages(tmp_path) if "`rollback`" in text]
    assert len(spikes) == 2
    assert not missing(spikes[0], "1e+12", "step 21")
    assert not missing(spikes[1], "50", "step 31")


@pytest.mark.parametrize(
    "losses",
    [
        [10.0 * 0.9**step for step in range(60)],
        [2.0 + math.sin(7 * step) for step in range(60)],
        [0.01 * math.sin(step) for step in range(1, 61)],
        [10.0] * 5 + [4.0] * 30 + [5.0] * 10,
    ],
    ids=["falling", "noisy", "around zero", "a step up"],
)
def test_what_is_no_spike_is_not_spoken_of(tmp_path: Path, losses: Losses) -> None:
    run(tmp_path, losses)
    assert messages(tmp_path) == []


def test_spikes_need_not_be_watched(tmp_path: Path) -> None:
    run(tmp_path, [2.0] * 20 + [1e12], train={"guard": {"spike": None}})
    assert messages(tmp_path) == []


@pytest.mark.parametrize(("steps", "told"), [(5, "5 steps"), (30, "20 steps")])
def test_a_run_without_targets_is_refused(tmp_path: Path, steps: int, told: str) -> None:
    with refused(DataError, told, "targets", "-100"):
        run(tmp_path, [0.0] * steps, counts=[0.0] * steps)


def test_single_steps_without_targets_are_told_of(tmp_path: Path) -> None:
    run(tmp_path, [1.0, 0.0, 1.0, 0.0], counts=[1.0, 0.0, 1.0, 0.0])
    found = messages(tmp_path)
    assert any(not missing(text, "step 2", "samples") for text in found)
    assert any(not missing(text, "2", "4 steps", "targets") for text in found)


def test_a_learning_rate_of_zero_all_the_way_is_told_of(tmp_path: Path) -> None:
    schedule = {"type": "LinearLR", "start_factor": 0.0, "end_factor": 0.0}
    run(tmp_path, [1.0] * 3, schedule=schedule)
    assert any(not missing(text, "3 steps", "`schedule`") for text in messages(tmp_path))


def test_validation_without_targets_is_refused(tmp_path: Path) -> None:
    data = [(torch.tensor(0.0), torch.tensor(0.0))] * 3
    with pytest.raises(DataError, match="val_data"):
        run(tmp_path, [1.0] * 3, val_data=torch.utils.data.DataLoader(data, batch_size=1))


class Apart(Told):
    """Its loss has a graph, and no parameter in it."""

    def forward(self, loss: Tensor, count: Tensor) -> LossTerm:
        return LossTerm(loss.sum().requires_grad_(), count.sum())


def test_a_loss_that_no_parameter_has_a_part_in_is_told_of(tmp_path: Path) -> None:
    run(tmp_path, [1.0] * 3, model=Apart)
    assert any(not missing(text, "3 steps", "gradient norm") for text in messages(tmp_path))


@pytest.mark.parametrize("late", [False, True])
def test_a_negative_count_of_targets_is_refused(tmp_path: Path, late: bool) -> None:
    with refused(ModelError, "-3 targets", "LossTerm"):
        run(tmp_path, [1.0] * 3, counts=[-3.0] * 3, late=late)


def test_a_warmup_longer_than_the_run_is_told_of(tmp_path: Path) -> None:
    run(tmp_path / "long", [1.0] * 3, schedule={"type": "CosineAnnealingLR", "warmup": 3})
    run(tmp_path / "short", [1.0] * 3, schedule={"type": "CosineAnnealingLR", "warmup": 2})
    assert any(not missing(text, "schedule.warmup", "3 steps") for text in messages(tmp_path / "long"))
    assert messages(tmp_path / "short") == []


def test_a_batch_larger_than_the_data_is_told_of(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(3), torch.ones(3))
    run(tmp_path, [1.0], data=data, batch={"total": 8})
    assert any(not missing(text, "batch.total", "8", "3 samples") for text in messages(tmp_path))
