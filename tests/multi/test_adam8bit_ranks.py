"""AdamW with 8-bit moments does not see how ranks share parameters, and shares its checkpoints with AdamW."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import entries, load_into, open_checkpoint, save_checkpoint
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.pieces import DeferredTensor
from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.engine.native import NativeEngine
from tests.multi.parity import MODEL, assert_same, full_tensors, run_steps, token_batches
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
    engine = prepare_native(Preparation(config, open_world(config)))
    if source is not None:
        checkpoint = open_checkpoint(Path(source))
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        load_into(checkpoint, engine.state_tensors(), world=engine.world)
        engine.state_loaded()
    for step in STEPS[:2]:
        engine.train_step(step[rank::size])
    tensors = engine.state_tensors()
    save_checkpoint(Path(target), tensors, {}, step=engine.steps, world=engine.world)
    return full_tensors(tensors)


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


TIERS: dict[str, dict[str, Any]] = {
    "device": {"zero": 3},
    "cpu": {"zero": 1, "offload": {"optimizer": "cpu", "bucket_mb": 0.05}},
    "nvme": {"zero": 2, "offload": {"optimizer": "nvme", "bucket_mb": 0.05}},
    "visits-nvme": {"zero": 3, "offload": {"optimizer": "nvme", "update": "device", "bucket_mb": 0.05}},
}


def engine_in(tier: str, folder: str) -> NativeEngine:
    strategy: dict[str, Any] = deepcopy(TIERS[tier])
    if "nvme" in tier:
        strategy["offload"]["path"] = folder
    config = parse_sections(seed=3, strategy=strategy, **SECTIONS).config
    engine = prepare_native(Preparation(config, open_world(config), log=lambda _: None))
    assert isinstance(engine, NativeEngine)
    return engine


def lates_of(engine: NativeEngine) -> set[str]:
    return {name for name, entry in engine.state_entries().items() if isinstance(entry, DeferredTensor)}


def go_on_packed(rank: int, size: int, steps: list[Any], tiers: list[str], folder: str) -> dict[Any, Any]:
    """Two steps in each tier, saved as they are packed, and one more; and that one from each of the checkpoints."""
    found: dict[Any, Any] = {}
    for tier in tiers:
        engine, target = engine_in(tier, folder), Path(folder) / tier
        for step in steps[:2]:
            engine.train_step(step[rank::size])
        found["lates", tier] = lates_of(engine)
        save_checkpoint(target, engine.state_entries(), {}, step=2, world=engine.world)
        assert lates_of(engine) == found["lates", tier]  # they were looked at, and are as they were
        found["saved", tier] = full_tensors(engine.state_tensors())
        engine.train_step(steps[2][rank::size])
        found["straight", tier] = full_tensors(engine.state_tensors())
    for saved, tier in product(tiers, repeat=2):
        engine, checkpoint = engine_in(tier, folder), open_checkpoint(Path(folder) / saved)
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        assert lates_of(engine) == found["lates", tier]  # nothing wide is made to read it
        load_into(checkpoint, engine.state_entries(), world=engine.world)
        engine.state_loaded()
        engine.train_step(steps[2][rank::size])
        found[saved, tier] = full_tensors(engine.state_tensors())
    return found


def test_packed_moments_are_saved_and_loaded_one_at_a_time_in_every_tier(two_ranks: RankPool, tmp_path: Path) -> None:
    steps, tiers = token_batches(random.randrange(10**6), 4)[:3], list(TIERS)
    found = two_ranks.run(go_on_packed, steps, tiers, str(tmp_path))[0]
    for tier in tiers:
        assert {name.rpartition(".")[2] for name in found["lates", tier]} == {"exp_avg", "exp_avg_sq"}
        with open_source(tmp_path / tier) as source:
            assert source.entries.keys() == found["saved", tier].keys()
            for name, tensor in found["saved", tier].items():
                assert torch.equal(source.read(name), tensor), (tier, name)
    for saved, tier in product(tiers, repeat=2):
        for name, tensor in found["straight", saved].items():
            # A gradient that is summed in another order may turn a code into its neighbour.
            near = 0.0 if saved == tier else 2e-3
            assert torch.dist(found[saved, tier][name], tensor) <= near * tensor.norm(), (saved, tier, name)
