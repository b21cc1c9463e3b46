"""AdamW with 8-bit moments does not see how ranks share parameters, and shares its checkpoints with AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import entries, load_into, open_checkpoint, save_checkpoint
from plait.config import parse_sections
from plait.strategy import prepare_native
from plait.world import open_world
from tests.multi.parity import MODEL, assert_same, run_steps, token_batches, whole
from tests.multi.ranks import RankPool

STEPS = token_batches(5, 4)[:3]
OPTIM = {"type": "AdamW8bit", "lr": 1e-2, "eps": 1e-3}
SECTIONS: dict[str, Any] = {"model": {**MODEL, "dim": 96}, "optim": OPTIM}


def at_every_stage(rank: int, size: int, strategies: list[Any]) -> list[Any]:
    return [run_steps(rank, size, {**SECTIONS, "strategy": strategy}, STEPS) for strategy in strategies]


def test_every_stage_is_one_process(two_ranks: RankPool) -> None:
    expected = run_steps(0, 1, SECTIONS, STEPS)
    for found in two_ranks.run(at_every_stage, ["ddp", "zero1", "zero3"]):
        for trace in found:
            # A number half-way between two levels may become the other one.
            assert_same(trace, expected, tolerance=2e-3, by_norm=True)


def go_on(rank: int, size: int, optim: str, strategy: Any, source: str | None, target: str) -> dict[str, Tensor]:
    """Two steps, from a checkpoint if there is one; what comes of it is saved."""
    sections = {**SECTIONS, "optim": {**OPTIM, "type": optim}}
    config = parse_sections(seed=3, strategy=strategy, **sections).config
    engine = prepare_native(config, open_world(config))
    if source is not None:
        checkpoint = open_checkpoint(Path(source))
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        load_into(checkpoint, engine.state_tensors(), world=engine.world)
        engine.state_loaded()
    for step in STEPS[:2]:
        engine.train_step(step[rank::size])
    tensors = engine.state_tensors()
    save_checkpoint(Path(target), tensors, {}, step=engine.steps, world=engine.world)
    return whole(tensors)


def test_a_run_changes_layout_and_between_8_and_32_bits_at_a_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    two_ranks.run(go_on, "AdamW8bit", "zero3", None, first)
    straight = two_ranks.run(go_on, "AdamW8bit", "zero3", first, second)[0]
    alone = go_on(0, 1, "AdamW8bit", {}, first, str(tmp_path / "alone"))
    wide = go_on(0, 1, "AdamW", {}, first, str(tmp_path / "wide"))
    back = go_on(0, 1, "AdamW8bit", {}, str(tmp_path / "wide"), str(tmp_path / "back"))
    assert straight.keys() == alone.keys() == wide.keys() == back.keys()
    for name, tensor in straight.items():
        for other, near in ((alone, 2e-3), (wide, 0.05)):
            assert tensor.dtype == other[name].dtype
            assert torch.dist(tensor, other[name]) <= near * tensor.norm()
