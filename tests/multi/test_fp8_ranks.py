"""Products in 8 bits, and the update that also rounds weights, do not see how ranks share parameters."""

from __future__ import annotations

from typing import Any

from tests.multi.parity import MODEL, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool

STEPS = token_batches(5, 4)[:3]
OPTIM = {"type": "AdamW", "lr": 1e-3, "eps": 1e-3}
CASES: list[dict[str, Any]] = [
    {"precision": {"fp8": {"recipe": "rowwise", "emulate": True}}, "optim": OPTIM},
    {"precision": "bf16", "optim": {**OPTIM, "implementation": "one-pass"}},
]
STRATEGIES = ["ddp", "zero3"]


def all_of_them(rank: int, size: int) -> list[Any]:
    return [
        run_steps(rank, size, {"model": {**MODEL, "dim": 32}, **case, "strategy": strategy}, STEPS)
        for case in CASES
        for strategy in STRATEGIES
    ]


def test_every_stage_is_one_process(two_ranks: RankPool) -> None:
    expected = [run_steps(0, 1, {"model": {**MODEL, "dim": 32}, **case}, STEPS) for case in CASES]
    for found in two_ranks.run(all_of_them):
        for index, trace in enumerate(found):
            assert_same(trace, expected[index // len(STRATEGIES)], tolerance=2e-3, by_norm=True)
