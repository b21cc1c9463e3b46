"""A run whose numbers come a step later: the same log, and an end that all ranks agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.multi.toys import Classifier, Points

from plait import Runner
from plait.engine import StepResult
from plait.trainer import Hook


def trained(folder: Path, *, late: bool, hooks: list[Hook] | None = None, **sections: Any) -> Runner:
    settings: dict[str, Any] = {
        "model": Classifier,
        "data": Points(24),
        "train": {"max_epochs": 2},
        "batch": {"total": 4},
        "optim": {"type": "AdamW", "lr": 0.1},
        "work_dir": folder,
        "log": {"console": "none", "sinks": ["jsonl"], "every": 4},
        "device": "cpu",
        "seed": 5,
    }
    runner = Runner(**{**settings, **sections}, hooks=hooks or [])
    runner.setup()
    engine: Any = runner.engine
    engine.updater.stays_on_device = late
    runner.train()
    runner.close()
    return runner


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    return [{"step": one["step"], "epoch": one["epoch"], **one["data"]} for one in lines if one["kind"] == kind]


def test_the_log_has_the_same_steps_and_numbers(tmp_path: Path) -> None:
    for late in (False, True):
        trained(tmp_path / str(late), late=late)
    found, expected = (events(tmp_path / str(late), "train") for late in (True, False))
    assert [one["step"] for one in found] == [4, 8, 12]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("step", "epoch", "lr", "skipped", "step_in_epoch"):
            assert ours[name] == theirs[name]
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


class Asks(Hook):
    """Asks to stop after the third step; on one rank of several a hook may look at a result, on others not."""

    def after_step(self, runner: Runner, result: StepResult) -> None:
        if runner.step == 3:
            assert result.loss > 0
            runner.stop("somebody asked")


@pytest.mark.parametrize(("late", "last"), [(False, 4), (True, 5)])
def test_a_request_to_stop_is_heard_one_step_later(tmp_path: Path, late: bool, last: int) -> None:
    runner = trained(tmp_path, late=late, hooks=[Asks()])
    assert (runner.step, runner.stop_reason) == (last, "somebody asked")
