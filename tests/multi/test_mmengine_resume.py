"""A run of MMEngine's runner goes on from its checkpoint, under another strategy and on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint import open_checkpoint
from plait.checkpoint.convert.detect import open_source
from plait.errors import PlaitError
from plait.frontends.mmengine import FlexibleRunner
from tests.multi.mmengine_toys import IN_FP32, Accuracy, Net, images, loader, run
from tests.multi.ranks import RankPool
from tests.refusals import refused

# In the middle of the second epoch, between two steps of the schedule that counts iterations.
SCHEDULES = [
    {"type": "LinearLR", "by_epoch": False, "begin": 0, "end": 7},
    {"type": "MultiStepLR", "milestones": [1, 2], "gamma": 0.5},
]
HOOKS: dict[str, Any] = {
    "logger": {"type": "LoggerHook", "interval": 2},
    "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 6, "save_last": False},
}
OPTIONS: dict[str, Any] = {"param_scheduler": SCHEDULES, "epochs": 3, "hooks": [{"type": "EMAHook", "momentum": 0.2}]}


def begin(rank: int, size: int, folder: str, strategy: str) -> tuple[list[float], list[float]]:
    """Train to the end, and leave a checkpoint of iteration 6 of 12."""
    runner, noted = run(Path(folder), IN_FP32[strategy], batch_size=8, default_hooks=HOOKS, **OPTIONS)
    runner.close()
    return noted.losses, noted.rates


def go_on(rank: int, size: int, folder: str, source: str, strategies: list[str]) -> list[Any]:
    found = []
    for strategy in strategies:
        into = Path(folder) / f"{strategy}-{size}"
        runner, noted = run(into, IN_FP32[strategy], batch_size=16 // size, resume=source, **OPTIONS)
        found.append((noted.losses, noted.rates, runner.iter, runner.epoch))
        runner.close()
    return found


def measure(rank: int, size: int, folder: str, source: str) -> list[dict[str, float]]:
    """Validate with a checkpoint's weights alone: there is no optimizer."""
    found = []
    for name in ("DDP", "ZeRO-3", "FSDP"):
        runner = FlexibleRunner(
            model=Net(),
            work_dir=str(Path(folder) / f"measured {name} {size}"),
            strategy=IN_FP32[name]["strategy"],
            val_dataloader=loader(images(20, 2), 16 // size, shuffle=False),
            val_cfg={},
            val_evaluator={"type": Accuracy},
            load_from=source,
        )
        found.append(runner.val())
        runner.close()
    return found


def test_a_checkpoint_goes_on_under_another_strategy_and_number_of_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    losses, rates = two_ranks.run(begin, str(tmp_path / "first"), "ZeRO-2")[0]
    last = Path((tmp_path / "first" / "last_checkpoint").read_text())
    assert last.name == "iter_12"
    half = tmp_path / "first" / "iter_6"
    resumed = two_ranks.run(go_on, str(tmp_path), str(half), ["FSDP", "DDP"])[0]
    resumed += go_on(0, 1, str(tmp_path), str(half), ["DDP"])
    for later, its_rates, iterations, epochs in resumed:
        assert later == pytest.approx(losses[6:], rel=1e-4)
        assert its_rates == pytest.approx(rates[6:], rel=1e-6)
        assert (iterations, epochs) == (12, 3)
    # Half a pass cannot be found again with batches of another size.
    with refused(PlaitError, half, "16", "batch_size"):
        run(tmp_path / "other", IN_FP32["DDP"], batch_size=8, resume=str(half), **OPTIONS)
    # Its weights alone will do to validate, under any strategy.
    assert len({str(each) for each in two_ranks.run(measure, str(tmp_path), str(half))[0]}) == 1
    # It is Plait's own checkpoint, and the average of the weights went on too.
    assert open_checkpoint(half).manifest.state["step_in_epoch"] == 2
    for name in ("FSDP-2", "DDP-2", "DDP-1"):
        torch.testing.assert_close(average(tmp_path / name / "epoch_3"), average(last), rtol=1e-3, atol=1e-5)


def average(checkpoint: Path) -> Tensor:
    with open_source(checkpoint) as source:
        return source.read("hook.ema.head.weight").clone()
