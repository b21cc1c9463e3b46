"""Products in 8 bits, and the update that also rounds weights, do not see how ranks share parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.parity import MODEL, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool

STEPS = token_batches(5, 4)[:3]
OPTIM = {"type": "AdamW", "lr": 1e-3, "eps": 1e-3}
HEAD: dict[str, Any] = {"precision": {"fp8": {"head": True, "emulate": True}}, "optim": OPTIM}
CASES: list[dict[str, Any]] = [
    {"precision": {"fp8": {"recipe": "rowwise", "emulate": True}}, "optim": OPTIM},
    {"precision": "bf16", "optim": {**OPTIM, "implementation": "one-pass"}},
    HEAD,
]
STRATEGIES = ["ddp", "zero3"]
WIDE = {**MODEL, "dim": 32}


def all_of_them(rank: int, size: int) -> tuple[list[Any], list[float]]:
    shared = [
        run_steps(rank, size, {"model": WIDE, **case, "strategy": strategy}, STEPS)
        for case in CASES
        for strategy in STRATEGIES
    ]
    # Only the last stage has a head; both see all micro-batches.
    staged = run_steps(0, 1, {"model": WIDE, **HEAD, "strategy": {"layout": {"pp": 2}}}, STEPS)
    return shared, [*staged.losses, *staged.norms]


def test_every_stage_is_one_process(two_ranks: RankPool) -> None:
    expected = [run_steps(0, 1, {"model": WIDE, **case}, STEPS) for case in CASES]
    for found, staged in two_ranks.run(all_of_them):
        for index, trace in enumerate(found):
            assert_same(trace, expected[index // len(STRATEGIES)], tolerance=2e-3, by_norm=True)
        assert staged == pytest.approx([*expected[-1].losses, *expected[-1].norms], rel=2e-3)
