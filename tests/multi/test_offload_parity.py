"""Offloaded training is resident training: the same losses, norms, skips, weights and optimizer state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.multi.nets import LoraNet, SometimesNet, rows, take
from tests.multi.parity import Trace, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool

# Small buckets, so that there are several of them; all units travel, also those of a few numbers.
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"optimizer": "cpu", "bucket_mb": 0.02},
    "nvme": {"optimizer": "nvme", "bucket_mb": 0.02},
    "ratio": {"optimizer": "cpu", "bucket_mb": 0.02, "ratio": 0.4},
    # The device is the same CPU here, but states travel to rooms of its own, and home again.
    "cpu-visits": {"optimizer": "cpu", "update": "device", "bucket_mb": 0.02},
    "nvme-visits": {"optimizer": "nvme", "update": "device", "bucket_mb": 0.02},
    "params-cpu": {"optimizer": "cpu", "params": "cpu", "persistent_params": 0, "bucket_mb": 0.02},
    "params-nvme": {"optimizer": "nvme", "params": "nvme", "persistent_params": 0, "bucket_mb": 0.02},
}
CASES = [
    *((stage, tier) for stage in (1, 2, 3) for tier in ("cpu", "nvme")),
    *((0, tier) for tier in ("cpu", "ratio", "cpu-visits")),
    *((stage, tier) for stage in (1, 2, 3) for tier in ("cpu-visits", "nvme-visits")),
    *((3, tier) for tier in ("params-cpu", "params-nvme")),
]
# The same additions in the same order; only the factor of all gradients is multiplied in elsewhere. Now and then its
# last bit rounds a 16-bit weight to its neighbour, and the next gradients show it.
TOLERANCE = {"fp32": 1e-6, "bf16": 3e-2, "fp16": 3e-2}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    # The first steps overflow, and are skipped on every rank.
    "fp16": {"compute": "fp16", "scaler": {"initial_power": 22, "hysteresis": 1}},
}


def run_tiers(
    rank: int, size: int, sections: dict[str, Any], steps: list[list[Any]], folder: str, cases: list[tuple[int, str]]
) -> dict[tuple[int, str], Trace]:
    """Each case on these ranks, and every stage without offload, as the tier `none`."""
    found = {}
    for stage, tier in [*((stage, "none") for stage in sorted({stage for stage, _ in cases})), *cases]:
        offload = {"optimizer": "none"} if tier == "none" else TIERS[tier]
        if "nvme" in offload.values():
            offload = {**offload, "path": folder}
        strategy = {"zero": stage, "offload": offload}
        found[stage, tier] = run_steps(rank, size, {**sections, "strategy": strategy}, steps)
    return found


def ten_steps(micro_batches: int) -> list[list[Any]]:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return token_batches(seed, micro_batches) + token_batches(seed + 1, micro_batches)


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 2), ("bf16", 1), ("fp16", 1)])
def test_every_tier_equals_the_resident_run(
    two_ranks: RankPool, precision: str, accumulation: int, tmp_path: Path
) -> None:
    steps = ten_steps(2 * accumulation)
    sections = {"precision": PRECISIONS[precision], "train": {"clip_norm": 0.5}}
    traces = two_ranks.run(run_tiers, sections, steps, str(tmp_path), CASES)[0]
    for stage, tier in CASES:
        expected = traces[stage, "none"]
        assert_same(traces[stage, tier], expected, tolerance=TOLERANCE[precision])
        assert any(expected.skipped) == (precision == "fp16")
    assert list(tmp_path.iterdir()) == []  # files have no names, so that nothing is left behind


def run_nets(
    rank: int, size: int, model: Any, steps: list[list[Any]], offload: dict[str, Any], stage: int, precision: str
) -> Trace:
    sections = {"strategy": {"zero": stage, "offload": offload}, "precision": precision}
    return run_steps(rank, size, sections, steps, model)


@pytest.mark.parametrize("model", [LoraNet, SometimesNet])
def test_frozen_and_unused_parameters_are_as_in_the_resident_run(
    two_ranks: RankPool, model: Any, tmp_path: Path
) -> None:
    steps: list[list[dict[str, Any]]] = [[take(rows(seed, 8), 0, 4), take(rows(seed, 8), 4, 8)] for seed in range(4)]
    if model is SometimesNet:
        steps = [
            [{**batch, "sideways": step == rank} for rank, batch in enumerate(row)] for step, row in enumerate(steps)
        ]
    for stage, precision in ((0, "bf16"), (3, "fp32"), (3, "bf16")):
        expected = two_ranks.run(run_nets, model, steps, {}, stage, precision)[0]
        for offload in (TIERS["cpu"], {**TIERS["params-nvme"], "path": str(tmp_path)}):
            if stage == 0 and "params" in offload:
                continue
            found = two_ranks.run(run_nets, model, steps, offload, stage, precision)[0]
            assert_same(found, expected, tolerance=TOLERANCE[precision])


def test_weights_that_were_built_in_memory_leave_it_once(two_ranks: RankPool) -> None:
    steps = ten_steps(2)[:2]
    expected = run_steps(0, 1, {}, steps)
    strategy = {"zero": 3, "meta_init": False, "offload": TIERS["params-cpu"]}
    for found in two_ranks.run(run_steps, {"strategy": strategy}, steps):
        assert_same(found, expected, tolerance=1e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp": {"sharding": "HYBRID_SHARD", "layout": {"dp_replicate": 2, "dp_shard": 2}},
    "tp": {"zero": 0, "layout": {"tp": 2}},
    "tp-zero2": {"zero": 2, "layout": {"tp": 2, "dp_shard": 2}},
    "tp-with-values": {"zero": 3, "layout": {"tp": 2, "dp_shard": 2}, "meta_init": False},
    "pp": {"zero": 0, "layout": {"pp": 2}},
    "pp-zero1": {"zero": 1, "layout": {"pp": 2, "dp_shard": 2}},
}


def run_layouts(rank: int, size: int, steps: list[list[Any]]) -> dict[tuple[str, str], Trace]:
    from plait.config import parse_sections
    from plait.distributed import open_world

    found = {}
    for layout, strategy in LAYOUTS.items():
        for tier, offload in (("none", {}), ("cpu", TIERS["cpu"])):
            sections = {"strategy": {**strategy, "offload": offload}, "precision": "bf16"}
            world = open_world(parse_sections(**sections).config)
            mine = [step[world.data_rank :: world.layout.data_parallel] for step in steps]
            found[layout, tier] = run_steps(0, 1, sections, mine, world=world)
    return found


def test_every_layout_can_be_offloaded(four_ranks: RankPool) -> None:
    steps = ten_steps(4)[:4]
    for traces in four_ranks.run(run_layouts, steps):
        for layout in LAYOUTS:
            assert_same(traces[layout, "cpu"], traces[layout, "none"], tolerance=TOLERANCE["bf16"])
