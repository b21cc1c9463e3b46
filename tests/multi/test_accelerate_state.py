"""`save_state` in the middle of an epoch, `load_state` under another strategy and with other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.errors import CheckpointError
from plait.frontends.accelerate import Accelerator, DeepSpeedPlugin, ProjectConfiguration
from tests.multi.ranks import RankPool
from tests.multi.test_accelerate_parity import Regression, rows
from tests.refusals import refused

STOP_EPOCH, STOP_BATCH = 1, 2


class Counter:
    """Something of the user's own, with a tensor and a number in it."""

    def __init__(self) -> None:
        self.seen, self.total = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total, "by_epoch": {0: (1.5, float("inf"))}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["by_epoch"] == {0: (1.5, float("inf"))}
        self.seen, self.total = state["seen"], state["total"]


def train(
    rank: int,
    size: int,
    sections: dict[str, Any],
    *,
    save: Path | None = None,
    load: Path | None = None,
    shuffle: bool = True,
    dropout: bool = True,
) -> dict[str, Any]:
    """Three epochs; saves in the middle of the second, or goes on from there."""
    torch.manual_seed(2)
    model = Regression()
    if not dropout:
        model.dropout = nn.Identity()  # type: ignore[assignment]
    if load is not None:
        torch.manual_seed(99)  # whatever comes next must come from the checkpoint
        for param in model.parameters():
            nn.init.zeros_(param)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, sections=sections)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    data = DataLoader(rows(24), batch_size=12 // (2 * size), shuffle=shuffle)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    start = 0
    if load is not None:
        accelerator.load_state(load)
        start = STOP_EPOCH
    losses, seen = [], []
    for epoch in range(start, 3):
        batches = accelerator.skip_first_batches(data) if load is not None and epoch == start else data
        for number, (x, y, index) in enumerate(batches, STOP_BATCH if batches is not data else 0):
            if save is not None and (epoch, number) == (STOP_EPOCH, STOP_BATCH):
                losses, seen = [], []
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x)["prediction"], y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            counter.seen += 1
            counter.total += 1
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            seen.append(sorted(accelerator.gather(index).tolist()))
            if save is not None and (epoch, number) == (STOP_EPOCH, STOP_BATCH - 1):
                accelerator.save_state(save)
    total = counter.total.tolist()
    return {"losses": losses, "seen": seen, "rate": schedule.get_last_lr(), "counter": (counter.seen, total)}


def save_and_load(rank: int, size: int, folder: Path) -> dict[str, Any]:
    whole = train(rank, size, {"strategy": "zero3"}, save=folder / "a")
    same = train(rank, size, {"strategy": "zero3"}, load=folder / "a")
    other = train(rank, size, {"strategy": "ddp"}, load=folder / "a")
    # With another number of ranks dropout draws other numbers, so without it.
    plain = train(rank, size, {"strategy": "zero2"}, save=folder / "b", dropout=False)
    return {"whole": whole, "same": same, "other": other, "plain": plain}


def test_training_goes_on_under_another_strategy_and_number_of_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(save_and_load, tmp_path):
        for name in ("same", "other"):
            _same(found[name], found["whole"])
    plain = found["plain"]
    alone = train(0, 1, {"strategy": "ddp"}, load=tmp_path / "b", dropout=False)
    assert alone["seen"][:2] == plain["seen"][:2]  # the rest of the epoch; later ones are shuffled by other generators
    assert alone["losses"][:2] == pytest.approx(plain["losses"][:2], rel=1e-5)


def look_alone(rank: int, size: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The main process alone keeps what `unwrap_model` gives, as scripts for DeepSpeed's stage 2 do."""
    torch.manual_seed(2)
    model = Regression()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(rows(24), batch_size=3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    alone, asked = [], []
    for x, y, _ in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x)["prediction"], y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            state = accelerator.unwrap_model(model).state_dict()
            alone.append({name: value.clone() for name, value in state.items()})
        asked.append(accelerator.get_state_dict(model))
    return alone, asked


def test_below_stage_3_of_deepspeed_the_main_process_has_the_weights(two_ranks: RankPool) -> None:
    (alone, asked), _ = two_ranks.run(look_alone)
    assert len(alone) == 4
    for one, other in zip(alone, asked, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(alone[0][name], alone[3][name]) for name in alone[0])


def test_one_process_saves_and_goes_on(tmp_path: Path) -> None:
    whole = train(0, 1, {}, save=tmp_path / "c")
    _same(train(0, 1, {}, load=tmp_path / "c"), whole)


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["seen"] == expected["seen"]
    assert found["counter"] == expected["counter"]
    assert found["rate"] == pytest.approx(expected["rate"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_checkpoints_are_named_and_counted_by_the_project(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    wanted = []
    for _ in range(3):
        wanted.append(model.weight.detach().clone())
        accelerator.save_state()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    accelerator.load_state()
    torch.testing.assert_close(model.weight, wanted[2])
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    torch.testing.assert_close(model.weight, wanted[1])


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refused(CheckpointError, tmp_path, "files"):
        Accelerator(cpu=True).save_state(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
