"""Experts that ranks share along both axes are saved and loaded under the names and shapes of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import entries, load_into, open_checkpoint
from tests.multi.parity import MODEL, full_tensors
from tests.multi.ranks import RankPool
from tests.multi.saving import make_engine, train_and_save

MOE = {**MODEL, "type": "moe", "experts": 4, "expert_dim": 16, "shared_experts": 1, "bias_rate": 0.01}
SPREAD: list[dict[str, Any]] = [
    {"layout": {"tp": 2, "ep": 2}, "zero": 3},
    {"layout": {"tp": 2, "dp_shard": 2}, "zero": 1},
    {"layout": {"tp": 4}},
]


def load(rank: int, size: int, strategies: list[Any], target: str) -> list[dict[str, Tensor]]:
    found = []
    for strategy in strategies:
        engine = make_engine(strategy, 99, MOE)
        checkpoint = open_checkpoint(Path(target))
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        load_into(checkpoint, engine.state_tensors(), world=engine.world)
        found.append(full_tensors(engine.state_tensors()))
    return found


def test_what_one_layout_of_experts_saved_any_other_loads_to_the_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    seed, writer = random.randrange(1000), random.randrange(len(SPREAD))
    print(f"seed {seed}, written by {SPREAD[writer]}")
    spread, alone = str(tmp_path / "spread"), str(tmp_path / "alone")
    saved = four_ranks.run(train_and_save, SPREAD[writer], spread, seed, MOE)[0]
    one = train_and_save(0, 1, {}, alone, seed, MOE)
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in one.items()}
    (back,) = load(0, 1, [{}], spread)
    others = four_ranks.run(load, SPREAD, spread)[0]
    (onto,) = four_ranks.run(load, [SPREAD[writer]], alone)[3]
    for found, expected in [(back, saved), *((other, saved) for other in others), (onto, one)]:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
