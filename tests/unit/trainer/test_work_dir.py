"""One run at a time writes into a folder, and a folder that cannot be written to is said to be one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from tests.refusals import missing, refused
from torch import nn

from plait import LossTerm, Runner
from plait.config import parse
from plait.errors import ConfigError
from plait.trainer.saving import WorkDir


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> LossTerm:
        error = (x - self.weight).square()
        return LossTerm(error.sum(), error.numel())


def train(folder: Path, **sections: object) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8))
    options = {"batch": {"total": 4}, "train": {"max_steps": 2}, "work_dir": str(folder), "device": "cpu", **sections}
    with Runner(Mean(), data, **options) as runner:
        runner.train()


def take_and_wait(folder: Path, taken: Event) -> None:
    place = WorkDir(str(folder))
    place.acquire(parse({}).config)
    taken.set()
    signal.pause()


def test_a_folder_that_a_run_writes_into_is_refused_until_that_run_is_gone(tmp_path: Path) -> None:
    """Gone in any way: the other one is killed here, and can tidy nothing up."""
    context = multiprocessing.get_context("fork")
    taken = context.Event()
    other = context.Process(target=take_and_wait, args=(tmp_path, taken))
    other.start()
    assert other.pid is not None
    try:
        assert taken.wait(60)
        with refused(ConfigError, f"process {other.pid}", key="work_dir"):
            train(tmp_path)
        assert not (tmp_path / "checkpoints" / "latest").exists()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    train(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_what_forked_processes_of_a_dead_run_still_do_is_in_nobodys_way(tmp_path: Path) -> None:
    place = WorkDir(str(tmp_path))
    place.acquire(parse({}).config)
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=signal.pause)
    worker.start()  # a data worker, say
    place.release()
    denied = context.Queue()
    second = context.Process(target=_try_to_take, args=(tmp_path, denied))
    second.start()
    assert denied.get(timeout=60) is False
    second.join()
    worker.kill()
    worker.join()


def _try_to_take(folder: Path, denied: multiprocessing.Queue[bool]) -> None:
    try:
        WorkDir(str(folder)).acquire(parse({}).config)
    except ConfigError:
        denied.put(True)
    else:
        denied.put(False)


def test_a_run_that_is_complete_says_so_when_it_is_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    assert "`train.max_steps`" not in capsys.readouterr().out
    train(tmp_path, checkpoint={"resume": "auto"})
    assert not missing(capsys.readouterr().out, "step 2", "`train.max_steps`")


def test_a_run_that_goes_on_does_not_pass_the_step_it_is_to_stop_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        train(tmp_path, checkpoint={"resume": "auto"}, train={"max_steps": 2, "stop_after": 1})
    assert not missing(capsys.readouterr().out, "step 1", "`train.max_steps`")
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000001"]
    ended = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["reason"]
    assert not missing(ended, "step 1", "train.stop_after"), "what reads it must not take the run for complete"


def test_a_report_that_cannot_be_written_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").mkdir(parents=True)
    train(tmp_path)
    assert not missing(capsys.readouterr().out, "report.json", "Is a directory")
    assert (tmp_path / "checkpoints" / "latest").exists()
