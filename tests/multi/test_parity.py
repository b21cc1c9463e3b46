"""Promise 1: any layout equals one process."""

from __future__ import annotations

import functools
import zlib
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

# With the same micro-batches, ranks change nothing but the order of sums, in fp32. Now and then the last bit of a
# sum rounds a 16-bit weight to its neighbour, and the next gradients show it.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-2}

# A loss scale far from overflow: near it, which steps are skipped depends on the last bit of a 16-bit sum. That
# all ranks skip the same steps has tests of its own.
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": {"compute": "fp16", "scaler": {"initial_power": 10}}}


@functools.cache
def alone(precision: str, micro_batches: int, clip_norm: float | None) -> tuple[int, dict[str, Any], list[Any], Trace]:
    """Batches that no other call gets, and what one process makes of them: seed, sections, steps, trace."""
    seed = zlib.crc32(repr((precision, micro_batches, clip_norm)).encode())
    steps = token_batches(seed, micro_batches)
    sections = {"precision": PRECISIONS[precision], "train": {"clip_norm": clip_norm}}
    return seed, sections, steps, run_steps(0, 1, {**sections, "strategy": {}}, steps)


def compare(
    pool: RankPool, strategy: dict[str, Any], precision: str, micro_batches: int, clip_norm: float | None
) -> None:
    seed, sections, steps, expected = alone(precision, micro_batches, clip_norm)
    print(f"seed {seed}")
    for found in pool.run(run_steps, {**sections, "strategy": strategy}, steps):
        assert_same(found, expected, tolerance=TOLERANCE[precision])


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one_process(two_ranks: RankPool, strategy: str, precision: str, accumulation: int) -> None:
    compare(two_ranks, STRATEGIES[strategy], precision, 2 * accumulation, clip_norm=0.5)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp-zero1"])
def test_four_ranks_equal_one_process(four_ranks: RankPool, strategy: str, precision: str, accumulation: int) -> None:
    hybrid = {
        "hsdp": {"sharding": "HYBRID_SHARD", "layout": {"dp_replicate": 2, "dp_shard": 2}},
        "hsdp-zero1": {"zero": 1, "layout": {"dp_replicate": 2, "dp_shard": 2}},
    }
    compare(four_ranks, {**STRATEGIES, **hybrid}[strategy], precision, 4 * accumulation, clip_norm=None)
