"""Engines that train a step and save: what tests of checkpoints compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint import save_checkpoint
from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Engine, Preparation, prepare_native
from tests.multi.parity import MODEL, full_tensors, token_batches


def make_engine(strategy: Any, seed: int, model: Mapping[str, Any] = MODEL) -> Engine:
    """One that starts from the weights of this seed."""
    sections = {"seed": seed, "optim": {"type": "AdamW", "lr": 1e-2}, "model": model, "strategy": strategy}
    config = parse_sections(device="cpu", **sections).config
    return prepare_native(Preparation(config, open_world(config)))


def train_and_save(
    rank: int, size: int, strategy: Any, target: str, seed: int, model: Mapping[str, Any] = MODEL
) -> dict[str, Tensor]:
    """A step, and a checkpoint after it; what it should have in it, whole."""
    engine = make_engine(strategy, seed, model)
    for step in token_batches(seed, 12)[:1]:
        engine.train_step(step[engine.world.data_rank :: engine.world.layout.data_parallel])
    save_checkpoint(Path(target), engine.state_tensors(), {}, step=engine.steps, world=engine.world)
    return full_tensors(engine.state_tensors())
