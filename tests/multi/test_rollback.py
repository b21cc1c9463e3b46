"""The loss leaps: weights, optimizer and step go back to a checkpoint, the data go on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.engine import StepResult
from plait.errors import ConfigError, TrainingError
from plait.trainer import Hook, Runner
from tests.multi.ranks import RankPool
from tests.multi.toys import Classifier, Points, Trace, whole_tensors
from tests.refusals import missing, refused

SAMPLES, TOTAL, EVERY = 40, 4, 5
AVERAGE = {"type": "ema", "decay": 0.8}
GOING_BACK: dict[str, Any] = {"type": "rollback", "window": 8, "patience": 2, "threshold": 8.0}


class Harm(Hook):
    """Spoils the weights at some steps, each of them once, as a bad update would."""

    priority = 10

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        if runner.step in self.steps:
            self.steps.remove(runner.step)
            for weight in runner.engine.weights().values():
                weight.mul_(-30.0)
            runner.engine.weights_changed()


class Late(Hook):
    """Lets the numbers of a step come one step later, as on a GPU."""

    def before_run(self, runner: Runner) -> None:
        runner.engine.updater.stays_on_device = True  # type: ignore[attr-defined]


def make(run: str, hooks: list[Any], **sections: Any) -> Runner:
    settings: dict[str, Any] = {
        "optim": {"type": "AdamW", "lr": 1e-3},
        "train": {"max_steps": 30},
        "batch": {"total": TOTAL},
        "checkpoint": {"every": EVERY, "resume": "auto"},
        "log": {"console": "none", "sinks": ["jsonl"]},
        "work_dir": run,
        "seed": 3,
        "device": "cpu",
    }
    return Runner(model=Classifier(0.2), data=Points(SAMPLES), hooks=hooks, **{**settings, **sections})


def harmed(
    rank: int, size: int, run: str, sections: dict[str, Any], steps: list[int], late: bool = False
) -> dict[str, Any]:
    hooks = [trace := Trace(), Harm(*steps), AVERAGE, GOING_BACK, *([Late()] if late else [])]
    with make(run, hooks, **sections) as runner:
        runner.train()
        return {"numbers": trace.numbers, "steps": runner.step, "tensors": whole_tensors(runner)}


def by_hand(
    rank: int, size: int, run: str, sections: dict[str, Any], saved: int, taken: int, late: bool = False
) -> dict[str, Any]:
    """Train to a checkpoint, and from there on with the data that follow `taken` steps."""
    stop = {"max_steps": 30, "stop_after": saved}
    hooks = [AVERAGE, *([Late()] if late else [])]
    with make(run, hooks, **{**sections, "train": stop}) as runner:
        runner.train()
    with make(run, [trace := Trace(), *hooks], **sections) as runner:
        runner.setup()
        assert runner.step == saved
        per_epoch = SAMPLES // TOTAL
        runner.set_position(taken // per_epoch, taken % per_epoch, samples=TOTAL)
        runner.train()
        return {"numbers": trace.numbers, "steps": runner.step, "tensors": whole_tensors(runner)}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ranks_go_back_together_and_on_with_the_data_that_come_next(
    two_ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    harm = random.randint(EVERY + 2, 20)
    saved, taken = (harm - 1) // EVERY * EVERY, harm + GOING_BACK["patience"]
    print(f"harm at {harm}: back to {saved}, after {taken} steps of data")
    sections: dict[str, Any] = {"strategy": strategy}
    found = two_ranks.run(harmed, str(tmp_path / "harmed"), sections, [harm])
    expected = two_ranks.run(by_hand, str(tmp_path / "hand"), sections, saved, taken)
    for mine, other in zip(found, expected, strict=True):
        assert mine["steps"] == other["steps"] == 30
        assert mine["numbers"][-len(other["numbers"]) :] == other["numbers"]
        for name, tensor in other["tensors"].items():
            assert torch.equal(mine["tensors"][name], tensor), name
    lines = [json.loads(line) for line in (tmp_path / "harmed" / "suspects.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [harm, harm + 1, harm + 2]
    seen = [part["numbers"] for part in found]
    for line in lines:  # those that the two ranks trained on at that step
        at = (line["step"] - 1) * TOTAL // 2
        assert sorted(line["samples"]) == sorted(number for part in seen for number in part[at : at + TOTAL // 2])
    told = [json.loads(line) for line in (tmp_path / "harmed" / "events-rank0.jsonl").read_text().splitlines()]
    texts = [event["data"]["text"] for event in told if event["kind"] == "message"]
    assert any(not missing(text, f"step-{saved:08d}", f"step {harm + 1}") for text in texts)


@pytest.mark.parametrize(
    ("sections", "late"),
    [
        ({}, True),
        ({"strategy": {"offload": "nvme"}}, False),
        ({"strategy": {"offload": {"optimizer": "cpu", "delayed": True}}}, False),
        ({"optim": {"type": "AdamW8bit", "lr": 1e-3}, "precision": "bf16"}, False),
        ({"checkpoint": {"every": EVERY, "async_save": True, "node_local": True, "resume": "auto"}}, False),
    ],
)
def test_state_goes_back_to_the_bit_wherever_it_lives(tmp_path: Path, sections: dict[str, Any], late: bool) -> None:
    found = harmed(0, 1, str(tmp_path / "harmed"), sections, [12], late)
    expected = by_hand(0, 1, str(tmp_path / "hand"), sections, 10, 12 + GOING_BACK["patience"] + late, late)
    assert found["numbers"][-len(expected["numbers"]) :] == expected["numbers"]
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name


class Crash(Hook):
    """Ends the run with an error as soon as it went back."""

    priority = 99

    def __init__(self) -> None:
        self.latest = 0

    def after_step(self, runner: Runner, result: StepResult) -> None:
        assert runner.step > self.latest, "it went back"
        self.latest = runner.step


def test_a_run_that_ends_after_going_back_resumes_past_the_data_in_question(tmp_path: Path) -> None:
    with make(str(tmp_path), [Harm(12), GOING_BACK, Crash()]) as runner, pytest.raises(AssertionError, match="back"):
        runner.train()
    with make(str(tmp_path), [trace := Trace(), GOING_BACK]) as runner:
        runner.setup()
        assert (runner.step, runner.epoch, runner.step_in_epoch) == (10, 1, 4)
        runner.train()
    assert len(trace.numbers) == 20 * TOTAL


def test_too_many_times_end_the_run_and_name_the_samples(tmp_path: Path) -> None:
    hooks = [Harm(*range(8, 30)), {**GOING_BACK, "most": 2}]
    with make(str(tmp_path), hooks) as runner, refused(TrainingError, "2 times", "`most`", "optim.lr", "samples"):
        runner.train()


def test_without_a_checkpoint_from_before_training_goes_on(tmp_path: Path) -> None:
    run = {"checkpoint": {"every": 25}}
    assert harmed(0, 1, str(tmp_path), run, [8])["steps"] == 30
    lines = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()]
    texts = [line["data"]["text"] for line in lines if line["kind"] == "message"]
    assert any("checkpoint" in text for text in texts)
    assert not any("step-000" in text for text in texts)


def test_a_loss_that_behaves_is_left_alone(tmp_path: Path) -> None:
    assert len(harmed(0, 1, str(tmp_path), {}, [])["numbers"]) == 30 * TOTAL
    assert not (tmp_path / "suspects.jsonl").exists()


@pytest.mark.parametrize(
    ("checkpoint", "named"),
    [({}, "`checkpoint.every`"), ({"every": 2, "keep": 1}, "`checkpoint.keep: 2`")],
)
def test_there_must_be_something_to_go_back_to(tmp_path: Path, checkpoint: dict[str, Any], named: str) -> None:
    with refused(ConfigError, named, key="hooks.0"):
        make(str(tmp_path), [GOING_BACK], checkpoint=checkpoint)


def test_a_step_that_is_not_finite_names_its_samples(tmp_path: Path) -> None:
    points = Points(SAMPLES)
    bad = random.randrange(SAMPLES)
    points.x[bad] = float("nan")
    settings: dict[str, Any] = {"train": {"max_steps": 10}, "checkpoint": {}}
    runner = make(str(tmp_path), [], **settings)
    runner.given = replace(runner.given, data=points)
    with runner:
        runner.train()
    (line,) = [json.loads(line) for line in (tmp_path / "suspects.jsonl").read_text().splitlines()]
    assert bad in line["samples"]
    assert len(line["samples"]) == TOTAL
    assert ", ".join(map(str, line["samples"])) in (tmp_path / "events-rank0.jsonl").read_text()
