"""Promise 1: any layout equals one process."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.multi.parity import Trace, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "fsdp-root-only": {"sharding": "FULL_SHARD", "wrap": {"min_params": 10**9}},
    "fsdp-prefetch": {"sharding": "FULL_SHARD", "forward_prefetch": 1, "backward_prefetch": 1},
    "shard-grad-op": {"sharding": "SHARD_GRAD_OP"},
}

# With the same micro-batches, ranks change nothing but the order of sums. Clipping then scales by a norm that
# may differ in its last bit, which can round a 16-bit weight to its neighbour.
UNCLIPPED = {"fp32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}
CLIPPED = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-2}


def fresh_seed() -> int:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def reference(sections: dict[str, Any], steps: list[list[Any]]) -> Trace:
    return run_steps(0, 1, {**sections, "strategy": {}}, steps)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one_process(two_ranks: RankPool, strategy: str, precision: str, accumulation: int) -> None:
    steps = token_batches(fresh_seed(), 2 * accumulation)
    sections = {"precision": precision, "train": {"clip_norm": 0.5}}
    expected = reference(sections, steps)
    for found in two_ranks.run(run_steps, {**sections, "strategy": STRATEGIES[strategy]}, steps):
        assert_same(found, expected, tolerance=CLIPPED[precision])


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp", "hsdp-zero1"])
def test_four_ranks_equal_one_process(four_ranks: RankPool, strategy: str, precision: str, accumulation: int) -> None:
    hybrid = {
        "hsdp": {"sharding": "HYBRID_SHARD", "layout": {"dp_replicate": 2, "dp_shard": 2}},
        "hsdp-zero1": {"zero": 1, "layout": {"dp_replicate": 2, "dp_shard": 2}},
    }
    steps = token_batches(fresh_seed(), 4 * accumulation)
    sections = {"precision": precision}
    expected = reference(sections, steps)
    for found in four_ranks.run(run_steps, {**sections, "strategy": {**STRATEGIES, **hybrid}[strategy]}, steps):
        assert_same(found, expected, tolerance=UNCLIPPED[precision])
