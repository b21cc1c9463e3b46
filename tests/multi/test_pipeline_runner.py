"""A pipeline under the Runner: the seeds' AlexNet, and what its run tells at the end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from plait.distributed.pipeline_schedule import theoretical_bubble
from plait.engine import StepResult
from plait.trainer import Hook, Runner
from tests.multi.ranks import RankPool
from tests.refusals import missing

EXAMPLE = Path(__file__).parents[2] / "examples" / "alexnet_pipeline.py"
# Batches of 256 in micro-batches of 8, as they are; pictures and layers are smaller, and nothing is dropped.
SMALL = ("--steps", "3", "--size", "63", "--width", "4", "--dropout", "0", "--log-every", "1")


class Losses(Hook):
    name = "losses"

    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.found.append(result.loss)


def train(rank: int, size: int, options: tuple[str, ...]) -> list[float]:
    spec = importlib.util.spec_from_file_location("alexnet_pipeline", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = Losses()
    runner = example.make_runner(example.options().parse_args([*SMALL, *options]), hooks=[losses], device="cpu")
    runner.train()
    return losses.found


def events(work_dir: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work_dir / f"events-rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(0, 1, ("--pp", "1", "--work-dir", str(tmp_path_factory.mktemp("alone"))))


@pytest.mark.parametrize(("schedule", "split"), [("1f1b", "time"), ("zbv", "parameters")])
def test_alexnet_has_the_losses_of_one_process_and_its_run_tells_how_idle_it_was(
    two_ranks: RankPool, tmp_path: Path, alone: list[float], schedule: str, split: str
) -> None:
    options = ("--schedule", schedule, "--split", split, "--work-dir", str(tmp_path))
    for losses in two_ranks.run(train, options):
        assert losses == pytest.approx(alone, rel=1e-5)
    ends = [events(tmp_path, rank)[-1]["data"]["pipeline"] for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["schedule"] == schedule
    assert ends[0]["theoretical"] == pytest.approx(theoretical_bubble(schedule, 2, 32))
    assert 0.0 < ends[0]["measured"] < 1.0
    told = [event["data"]["text"] for event in events(tmp_path, 0) if event["kind"] == "message"]
    assert len(told) == 1
    assert not missing(told[0], "pipeline", schedule, *(f"{ends[0][key]:.0%}" for key in ("measured", "theoretical")))
    assert not [event for event in events(tmp_path, 1) if event["kind"] == "message"]


def test_a_run_without_a_pipeline_tells_nothing_of_one(tmp_path: Path) -> None:
    train(0, 1, ("--pp", "1", "--steps", "1", "--batch", "8", "--work-dir", str(tmp_path)))
    assert "pipeline" not in events(tmp_path, 0)[-1]["data"]
    assert not [event for event in events(tmp_path, 0) if event["kind"] == "message"]
