"""Training goes on from a checkpoint that has been through another framework's format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait import Runner
from plait.cli.main import main
from plait.engine import StepResult
from plait.trainer import Hook

MODEL = {"type": "gpt", "vocab_size": 61, "dim": 16, "layers": 2, "heads": 2, "seq_len": 8}
WAYS = {
    "torch": ["--to", "torch", "--optimizer"],
    "deepspeed": ["--to", "deepspeed"],
}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, seed: int) -> None:
        self.rows = torch.randint(61, (20, 9), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.found.append(result.loss)


def train(folder: Path, seed: int, *, stop: int | None = None, **checkpoint: Any) -> list[float]:
    losses = Losses()
    with Runner(
        model=MODEL,
        data=Rows(seed),
        optim={"lr": 1e-2},
        batch={"total": 4},
        train={"max_steps": 8, "stop_after": stop},
        checkpoint=checkpoint,
        hooks=[losses],
        work_dir=str(folder),
        device="cpu",
        log={"console": "none", "sinks": []},
    ) as runner:
        runner.train()
    return losses.found


def convert(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["plait", "convert", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize("way", WAYS)
def test_losses_go_on_bitwise_as_if_nothing_had_happened(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(torch.empty((), dtype=torch.int64).random_())
    print(f"seed {seed}")
    expected = train(tmp_path / "whole", seed)
    begun = train(tmp_path / "begun", seed, stop=3)
    convert(monkeypatch, tmp_path / "begun", tmp_path / "there", *WAYS[way])
    convert(monkeypatch, tmp_path / "there", tmp_path / "back", "--to", "plait")
    # The state of random numbers is Plait's own, and no other format has a place for it.
    rest = train(tmp_path / "rest", seed, resume=str(tmp_path / "back"))
    assert begun + rest == expected
