"""Scales of earlier steps are the same on every rank, and those of one process; a checkpoint takes them anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait import Runner
from plait.engine import StepResult
from plait.trainer import Hook
from tests.multi.ranks import RankPool

LLAMA = {"type": "llama", "vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 12}
ROWS = torch.randint(61, (64, 13), generator=torch.Generator().manual_seed(5))
DATA = [{"input_ids": row[:-1], "labels": row[1:]} for row in ROWS]
STEPS, HALF = 6, 3


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.found.append(result.loss)


def train(folder: Path, strategy: Any, steps: int, *, resume: bool = False) -> tuple[list[float], dict[str, Any]]:
    """The losses of a run, and what it knows of its layers at the end."""
    losses = Losses()
    runner = Runner(
        model=LLAMA,
        data=DATA,
        batch={"total": 8, "micro": 2},
        train={"max_steps": steps},
        precision={"fp8": {"emulate": True, "scales": "earlier", "history": 2}},
        strategy=strategy,
        optim={"type": "AdamW", "lr": 1e-3, "eps": 1e-3},
        checkpoint={"resume": "auto"} if resume else {},
        log={"console": "none", "sinks": []},
        work_dir=folder,
        plan="off",
        device="cpu",
        hooks=[losses],
    )
    try:
        runner.train()
        return losses.found, runner.engine.state()["fp8"]["peaks"]
    finally:
        runner.close()


STRATEGIES: list[Any] = ["ddp", "zero3", {"layout": {"pp": 2}}]


def all_of_them(rank: int, size: int, folder: Path) -> list[Any]:
    found = [train(folder / f"whole{index}", strategy, STEPS) for index, strategy in enumerate(STRATEGIES)]
    train(folder / "moved", "zero3", HALF)
    train(folder / "parts", "ddp", HALF)
    return [*found, train(folder / "parts", "ddp", STEPS, resume=True)]


def near(found: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0][-len(found[0]) :], rel=2e-3)
    assert sorted(found[1]) == sorted(expected[1])
    for name, numbers in expected[1].items():
        torch.testing.assert_close(torch.tensor(found[1][name]), torch.tensor(numbers), rtol=0.1, atol=0.0)


def test_any_layout_has_the_scales_of_one_process_and_goes_on_with_them(two_ranks: RankPool, tmp_path: Path) -> None:
    one, other = two_ranks.run(all_of_them, tmp_path)
    assert one == other
    expected = train(tmp_path / "alone", None, STEPS)
    *whole, parts = one
    for found in whole:
        near(found, expected)
    assert parts == (whole[0][0][HALF:], whole[0][1])  # on the same ranks, bit by bit
    near(train(tmp_path / "moved", None, STEPS, resume=True), expected)
