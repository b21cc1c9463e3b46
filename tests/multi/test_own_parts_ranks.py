"""Parts of one's own on several ranks: the same losses as on one, and sinks where they want to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait import Runner
from plait.engine import StepResult
from plait.models import LossTerm
from plait.monitor import Event
from plait.trainer import Hook
from tests.multi.ranks import RankPool

HERE = __name__


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(64, (count, 9), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def weighted(outputs: LossTerm, batch: Mapping[str, Tensor], by: float) -> LossTerm:
    return LossTerm(outputs.sum * by + 0.01 * batch["labels"].sum(), outputs.count)


class Everywhere:
    """A log sink that every rank has."""

    every_rank = True

    def __init__(self, work_dir: Path, rank: int) -> None:
        self.path = work_dir / f"heard-by-{rank}"

    def write(self, event: Event) -> None:
        self.path.touch()

    def close(self) -> None:
        """Nothing is open."""


class First(Everywhere):
    """One that rank 0 has."""

    every_rank = False

    def __init__(self, work_dir: Path) -> None:
        super().__init__(work_dir, 100)
        assert not self.path.exists()


class Losses(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.losses.append(result.loss)


def train(rank: int, size: int, folder: str, strategy: Any) -> list[float]:
    hook = Losses()
    runner = Runner(
        model={"type": "llama", "vocab_size": 64, "dim": 16, "layers": 2, "heads": 2, "seq_len": 8},
        data={"type": f"{HERE}:Rows", "count": 8},
        train={"max_steps": 3, "loss": {"type": f"{HERE}:weighted", "by": 2.0}},
        batch={"total": 4, "micro": 2 if strategy == {"layout": {"pp": 2}} else None},
        hooks=[hook],
        strategy=strategy,
        log={"console": "none", "sinks": [f"{HERE}:Everywhere", f"{HERE}:First"]},
        device="cpu",
        work_dir=folder,
    )
    with runner:
        runner.train()
    return hook.losses


@pytest.mark.parametrize("strategy", [{"zero": 3}, {"layout": {"tp": 2}}, {"layout": {"pp": 2}}], ids=str)
def test_a_named_loss_is_the_same_under_every_layout(two_ranks: RankPool, tmp_path: Path, strategy: Any) -> None:
    expected = train(0, 1, str(tmp_path / "one"), None)
    for found in two_ranks.run(train, str(tmp_path / "two"), strategy):
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[0] > 8.0  # twice that of a model that knows nothing
    heard = {path.name for path in (tmp_path / "two").glob("heard-by-*")}
    assert heard == {"heard-by-0", "heard-by-1", "heard-by-100"}
