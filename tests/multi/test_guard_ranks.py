"""A step that went wrong on one rank is left out on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import parse_sections
from plait.distributed import open_world, to_local
from plait.engine import Preparation, prepare_native
from plait.errors import NonFiniteError
from tests.multi import nets
from tests.multi.ranks import RankPool
from tests.refusals import missing

STAGES: dict[str, dict[str, Any]] = {"ddp": {}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}


def train(rank: int, size: int, sections: dict[str, Any], bad: dict[int, int], steps: int) -> dict[str, Any]:
    """Train; in step s of `bad`, the batch of rank bad[s] is infinite."""
    config = parse_sections(**{"optim": {"type": "AdamW", "lr": 0.01}, **sections}).config
    said: list[str] = []
    engine = prepare_native(Preparation(config, open_world(config), model=nets.Net, log=said.append))
    found: dict[str, Any] = {"skipped": [], "scales": [], "moved": [], "said": said, "error": None}
    for step in range(steps):
        before = {name: to_local(t.detach()).clone() for name, t in engine.state_tensors().items()}
        batch = nets.rows(10 * step + rank, 3)
        if bad.get(step) == rank:
            batch["x"] = torch.full_like(batch["x"], float("inf"))
        try:
            result = engine.train_step([batch])
        except NonFiniteError as error:
            found["error"] = str(error)
            break
        after: dict[str, Tensor] = {name: to_local(t.detach()) for name, t in engine.state_tensors().items()}
        found["skipped"].append(result.skipped)
        found["moved"].append(any(n not in before or not torch.equal(before[n], t) for n, t in after.items()))
        if engine.updater.scaler is not None:
            found["scales"].append(engine.updater.scaler.scale)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_everywhere_and_lowers_one_scale(two_ranks: RankPool, stage: str) -> None:
    scaler = {"initial_power": 6, "hysteresis": 2, "window": 2}
    sections = {"strategy": STAGES[stage], "precision": {"compute": "fp16", "scaler": scaler}}
    for found in two_ranks.run(train, sections, {1: 1, 2: 0, 3: 1}, 7):
        assert found["skipped"] == [False, True, True, True, False, False, False]
        assert found["moved"] == [True, False, False, False, True, True, True]
        assert found["scales"] == [64, 64, 32, 16, 16, 32, 32]
        assert found["said"] == []  # searching for a scale is nothing to speak of


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_scale_every_rank_skips_and_the_first_bad_module_is_named(two_ranks: RankPool, stage: str) -> None:
    for found in two_ranks.run(train, {"strategy": STAGES[stage]}, {1: 1}, 3):
        assert found["skipped"] == [False, True, False]
        assert found["moved"] == [True, False, True]
        # Rank 0 saw only its gradients go wrong; rank 1 knows the module.
        assert len(found["said"]) == 1
        assert not missing(found["said"][0], "step 1", "output", "layers.0.norm", "rank 1")


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_every_rank_stops_after_too_many_bad_steps_in_a_row(two_ranks: RankPool, stage: str) -> None:
    sections = {"strategy": STAGES[stage], "train": {"guard": {"max_skips": 2}}}
    for found in two_ranks.run(train, sections, {0: 0, 2: 1, 3: 0}, 6):
        assert found["skipped"] == [True, False, True]  # the good step between them began the count anew
        assert not missing(found["error"], "2 steps", "output", "layers.0.norm", "rank 0", "train.guard.max_skips")


def test_every_rank_stops_where_most_of_the_latest_steps_were_skipped(two_ranks: RankPool) -> None:
    guard = {"window": 6, "max_share": 0.5}
    for found in two_ranks.run(train, {"train": {"guard": guard}}, {1: 0, 2: 1, 4: 1, 5: 0}, 9):
        assert found["skipped"] == [False, True, True, False, True]
        assert not missing(found["error"], "4 ", "6 steps", "rank 0", "train.guard.max_share")


def stop(rank: int, size: int) -> list[bool]:
    config = parse_sections(strategy="zero3").config
    engine = prepare_native(Preparation(config, open_world(config), model=nets.Net))
    stops = []
    for step in range(4):
        if step == 1 and rank == 1:
            engine.request_stop()
        stops.append(engine.train_step([nets.rows(step, 2)]).stop)
    return stops


def test_one_rank_that_wants_to_stop_tells_all_in_the_same_step(two_ranks: RankPool) -> None:
    assert two_ranks.run(stop) == [[False, True, False, False]] * 2
