"""A checkpoint does not know where the state lived that it was made of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import entries, load_into, open_checkpoint, save_checkpoint
from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from tests.multi.parity import MODEL, Trace, assert_same, token_batches
from tests.multi.ranks import RankPool

TIERS: dict[str, dict[str, Any]] = {
    "device": {"zero": 2},
    "cpu": {"zero": 1, "offload": {"optimizer": "cpu", "bucket_mb": 0.02}},
    "nvme": {"zero": 2, "offload": {"optimizer": "nvme", "bucket_mb": 0.02}},
    "params-nvme": {"zero": 3, "offload": {"optimizer": "nvme", "params": "nvme", "persistent_params": 0}},
    "visits-nvme": {"zero": 3, "offload": {"optimizer": "nvme", "update": "device", "bucket_mb": 0.02}},
    "delayed": {"zero": 0, "offload": {"optimizer": "cpu", "delayed": True}},
}
HALF = 2


def engine_of(tier: str, folder: str) -> tuple[Any, Any]:
    strategy = {key: dict(value) if isinstance(value, dict) else value for key, value in TIERS[tier].items()}
    if "nvme" in tier:
        strategy["offload"]["path"] = folder
    sections = {
        "seed": 3,
        "model": MODEL,
        "precision": "bf16",
        "strategy": strategy,
        "optim": {"lr": 1e-2, "eps": 0.1},
    }
    config = parse_sections(**sections).config
    world = open_world(config)
    return prepare_native(Preparation(config, world, log=lambda _: None)), world


def train(engine: Any, steps: list[list[Any]], rank: int, size: int, trace: Trace) -> None:
    for step in steps:
        result = engine.train_step(step[rank::size])
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.skipped.append(result.skipped)


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    found = engine.state_tensors()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in found.items()}


def save_all(rank: int, size: int, steps: list[list[Any]], folder: str) -> Trace:
    """Half a run in each tier, saved; the whole run on the device is returned."""
    for tier in TIERS:
        engine, world = engine_of(tier, folder)
        train(engine, steps[:HALF], rank, size, Trace([], [], [], {}))
        target = Path(folder) / tier
        save_checkpoint(target, engine.state_tensors(), {"engine": engine.state()}, step=HALF, world=world)
        if tier == "device":
            trace = Trace([], [], [], {})
            train(engine, steps[HALF:], rank, size, trace)
            trace.tensors = whole_state(engine)
    return trace


def resume_all(rank: int, size: int, steps: list[list[Any]], folder: str) -> dict[tuple[str, str], Trace]:
    """The second half in each tier, from the first half in each."""
    found = {}
    for saved in TIERS:
        for tier in TIERS:
            if "delayed" in (saved, tier) and saved != tier and "device" not in (saved, tier):
                continue
            engine, world = engine_of(tier, folder)
            checkpoint = open_checkpoint(Path(folder) / saved)
            engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
            load_into(checkpoint, engine.state_tensors(), world=world)
            engine.state_loaded()
            engine.restore(checkpoint.manifest.state["engine"])
            trace = Trace([], [], [], {})
            train(engine, steps[HALF:], rank, size, trace)
            trace.tensors = whole_state(engine)
            found[saved, tier] = trace
    return found


def test_a_run_goes_on_from_any_tier_in_any_other(two_ranks: RankPool, tmp_path: Path) -> None:
    steps = token_batches(random.randrange(2**31), 2)[: 2 * HALF]
    expected = two_ranks.run(save_all, steps, str(tmp_path))[0]
    found = two_ranks.run(resume_all, steps, str(tmp_path))[0]
    for (saved, tier), trace in found.items():
        if "delayed" not in (saved, tier):
            assert_same(trace, expected, tolerance=3e-2)
    # A delayed run is another run; but saving completes the update that is late, so its state is a state like others.
    assert found["delayed", "device"].losses[0] == found["delayed", "delayed"].losses[0]
    assert found["device", "delayed"].losses[0] == expected.losses[0]
