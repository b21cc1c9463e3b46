"""Steps that the device decides, on two ranks: what is heard a step later is heard by both, and is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import NonFiniteError
from tests.multi import nets
from tests.multi.ranks import RankPool


def train(rank: int, size: int, zero: int, bad: dict[int, int], steps: int, late: bool) -> dict[str, Any]:
    """Train; in step s of `bad`, the batch of rank bad[s] is infinite."""
    config = parse_sections(
        optim={"type": "AdamW", "lr": 0.01}, strategy={"zero": zero}, train={"guard": {"max_skips": 2}}
    ).config
    said: list[str] = []
    engine = prepare_native(Preparation(config, open_world(config), model=nets.Net, log=said.append))
    engine.updater.stays_on_device = late
    results, error = [], None
    for step in range(steps):
        batch = nets.rows(10 * step + rank, 3)
        if bad.get(step) == rank:
            batch["x"] = torch.full_like(batch["x"], float("inf"))
        try:
            results.append(engine.train_step([batch]))
        except NonFiniteError as found:
            error = str(found)
            break
    return {"late": [result.asynchronous for result in results], "results": results, "said": said, "error": error}


@pytest.mark.parametrize("zero", [0, 3])
def test_both_ranks_hear_the_same_one_step_later(two_ranks: RankPool, zero: int) -> None:
    bad = {1: 1, 3: 0, 4: 1}
    expected = two_ranks.run(train, zero, bad, 6, False)[0]
    for found in two_ranks.run(train, zero, bad, 6, True):
        assert found["late"] == [True] * 5
        assert [one.skipped for one in found["results"]] == [False, True, False, True, True]
        assert found["said"] == expected["said"]
        assert found["error"] == expected["error"]
        for ours, theirs in zip(found["results"], expected["results"], strict=False):
            assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4, nan_ok=True)
