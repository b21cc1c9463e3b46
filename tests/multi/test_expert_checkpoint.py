"""Experts that ranks share along both axes are saved and loaded under the names and shapes of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint import entries, load_into, open_checkpoint, save_checkpoint
from plait.config import parse_sections
from plait.strategy import Engine, prepare_native
from plait.world import open_world
from tests.multi.parity import MODEL, token_batches
from tests.multi.ranks import RankPool

MOE = {**MODEL, "type": "moe", "experts": 4, "expert_dim": 16, "shared_experts": 1, "bias_rate": 0.01}
SPREAD: list[dict[str, Any]] = [
    {"layout": {"tp": 2, "ep": 2}, "zero": 3},
    {"layout": {"tp": 2, "dp_shard": 2}, "zero": 1},
    {"layout": {"tp": 4}},
]


def make_engine(strategy: Any, seed: int) -> Engine:
    sections = {"seed": seed, "optim": {"type": "AdamW", "lr": 1e-2}, "model": MOE, "strategy": strategy}
    config = parse_sections(device="cpu", **sections).config
    return prepare_native(config, open_world(config))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def train_and_save(rank: int, size: int, strategy: Any, target: str, seed: int) -> dict[str, Tensor]:
    engine = make_engine(strategy, seed)
    (step, *_) = token_batches(seed, 4)
    engine.train_step(step[engine.world.data_rank :: engine.world.layout.data_parallel])
    save_checkpoint(Path(target), engine.state_tensors(), {}, step=engine.steps, world=engine.world)
    return whole(engine.state_tensors())


def load(rank: int, size: int, strategies: list[Any], target: str) -> list[dict[str, Tensor]]:
    found = []
    for strategy in strategies:
        engine = make_engine(strategy, seed=99)
        checkpoint = open_checkpoint(Path(target))
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        load_into(checkpoint, engine.state_tensors(), world=engine.world)
        found.append(whole(engine.state_tensors()))
    return found


def test_what_one_layout_of_experts_saved_any_other_loads_to_the_bit(four_ranks: RankPool, tmp_path: Path) -> None:
    seed, writer = random.randrange(1000), random.randrange(len(SPREAD))
    print(f"seed {seed}, written by {SPREAD[writer]}")
    spread, alone = str(tmp_path / "spread"), str(tmp_path / "alone")
    saved = four_ranks.run(train_and_save, SPREAD[writer], spread, seed)[0]
    one = train_and_save(0, 1, {}, alone, seed)
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in one.items()}
    (back,) = load(0, 1, [{}], spread)
    others = four_ranks.run(load, SPREAD, spread)[0]
    (onto,) = four_ranks.run(load, [SPREAD[writer]], alone)[3]
    for found, expected in [(back, saved), *((other, saved) for other in others), (onto, one)]:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
