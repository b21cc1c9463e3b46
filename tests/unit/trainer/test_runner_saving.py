"""When a run saves, what it keeps, and how it goes on."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.toys import Classifier, Points, Trace, assert_close, fit
from tests.refusals import missing, refused
from torch.utils.data import DataLoader

from plait import Runner
from plait.errors import CheckpointError, ConfigError, TrainingError
from plait.trainer import Hook
from plait.trainer.watch import StopSignals


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


class Scores(Hook):
    priority = 10

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        metrics["score"] = self.scores.pop(0)  # type: ignore[index]


def test_every_so_often_and_at_the_end_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path, "train": {"max_steps": 9}, "checkpoint": {"every": 2, "keep": 2}})
    assert names(tmp_path) == ["latest", *steps(8, 9)]
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000009"


def test_without_a_word_a_run_saves_once_at_its_end(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path / "a"})
    assert names(tmp_path / "a") == ["latest", *steps(12)]
    fit(0, 1, {"work_dir": tmp_path / "b", "checkpoint": {"last": False}})
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_the_best_one_is_kept_beyond_the_newest_and_linked(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "keep": 1, "best": {"metric": "score", "mode": "max"}}
    train = {"max_epochs": 5}
    scores = [0.1, 0.7, 0.6, 0.7, 0.2]
    fit(0, 1, {"work_dir": tmp_path, "train": train, "checkpoint": checkpoint, "hooks": [Scores(scores)]}, validation=3)
    assert names(tmp_path) == ["best", "latest", *steps(12, 30)]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000012"


def test_a_resumed_run_knows_how_good_the_best_one_was(tmp_path: Path) -> None:
    checkpoint = {"keep": 1, "best": {"metric": "score", "mode": "min"}}
    fit(0, 1, {"work_dir": tmp_path, "checkpoint": checkpoint, "hooks": [Scores([3.0, 1.0])]}, validation=3)
    resumed = {"work_dir": tmp_path, "train": {"max_epochs": 4}, "checkpoint": {**checkpoint, "resume": "auto"}}
    fit(0, 1, {**resumed, "hooks": [Scores([2.0, 1.5])]}, validation=3)
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000012"
    assert names(tmp_path) == ["best", "latest", *steps(12, 24)]


@pytest.mark.parametrize("optim", ["AdamW", "SGD"])
def test_a_resumed_run_equals_one_that_was_never_interrupted_bit_by_bit(tmp_path: Path, optim: str) -> None:
    stop = random.randint(1, 11)
    print(f"stop at {stop}")
    options: dict[str, Any] = {"dropout": 0.3, "validation": 5}
    settings = {"optim": {"type": optim, "lr": 0.05, **({"momentum": 0.9} if optim == "SGD" else {})}}
    whole = fit(0, 1, {**settings, "work_dir": tmp_path / "whole"}, **options)
    first = fit(0, 1, {**settings, "work_dir": tmp_path / "parts"}, stop_at=stop, **options)
    torch.manual_seed(random.randrange(2**31))  # nothing of the generators' state may be needed
    random.seed(random.randrange(2**31))
    second = fit(0, 1, {**settings, "work_dir": tmp_path / "parts", "checkpoint": {"resume": "auto"}}, **options)
    assert first.steps == stop
    assert first.reason == "the test said so"
    assert first.losses + second.losses == whole.losses
    assert first.rates + second.rates == whole.rates
    assert first.numbers + second.numbers == whole.numbers
    assert second.metrics[-1] == whole.metrics[-1]
    assert_close(second, whole, tolerance=0)
    assert (second.steps, second.epochs) == (12, 2)


@pytest.mark.parametrize("micro", [4, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_so_does_one_in_half_precision_with_its_loss_scale(tmp_path: Path, precision: str, micro: int) -> None:
    section: dict[str, Any] = {"compute": precision}
    if precision == "fp16":  # overflows at first, then grows again
        section["scaler"] = {"initial_power": 40, "window": 2, "hysteresis": 1}
    batch = {"total": 4, "micro": micro}
    settings = {"precision": section, "batch": batch, "train": {"max_steps": 40, "guard": {"max_skips": 30}}}
    whole = fit(0, 1, {**settings, "work_dir": tmp_path / "whole"})
    fit(0, 1, {**settings, "work_dir": tmp_path / "parts"}, stop_at=35)
    second = fit(0, 1, {**settings, "work_dir": tmp_path / "parts", "checkpoint": {"resume": "auto"}})
    assert second.losses == whole.losses[35:]
    assert second.extra == whole.extra
    assert_close(second, whole, tolerance=0)
    if precision == "fp16":
        assert any(whole.skipped)
        assert whole.extra["engine"]["scaler"]["scale"] < 2.0**40


def test_going_back_to_an_earlier_checkpoint_makes_what_follows_the_newest(tmp_path: Path) -> None:
    settings = {"work_dir": tmp_path, "train": {"max_steps": 9}, "checkpoint": {"every": 3}}
    fit(0, 1, settings)
    back = str(tmp_path / "checkpoints" / "step-00000003")
    fit(0, 1, {**settings, "train": {"max_steps": 5}, "checkpoint": {"keep": 1, "resume": back}})
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000005"
    assert names(tmp_path) == ["latest", *steps(5)]
    again = fit(0, 1, {**settings, "checkpoint": {"resume": "auto"}})
    assert len(again.losses) == 4


@pytest.mark.parametrize(("stop", "told"), [(4, True), (6, False)], ids=["within an epoch", "between two"])
def test_another_order_within_an_epoch_is_told(tmp_path: Path, stop: int, told: bool) -> None:
    settings: dict[str, Any] = {"work_dir": tmp_path, "seed": 3, "log": {"sinks": ["jsonl"]}}
    fit(0, 1, {**settings, "train": {"max_epochs": 2, "stop_after": stop}})
    said = []
    for seed in (3, 4):
        fit(
            0,
            1,
            {**settings, "seed": seed, "train": {"max_epochs": 2}, "checkpoint": {"resume": "auto", "last": False}},
        )
        events = (tmp_path / "events-rank0.jsonl").read_text().splitlines()
        said.append(sum("within an epoch" in line and "seed: 3" in line for line in events))
    assert said == [0, int(told)]


def test_resume_takes_a_run_or_one_of_its_checkpoints_into_another_folder(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path / "a", "train": {"max_steps": 4}, "checkpoint": {"every": 2}})
    for name, steps_left in ((".", 2), ("checkpoints/step-00000002", 4), ("checkpoints/latest", 2)):
        target = tmp_path / name.replace("/", "_").replace(".", "run")
        resume = {"resume": str(tmp_path / "a" / name)}
        outcome = fit(0, 1, {"work_dir": target, "train": {"max_steps": 6}, "checkpoint": resume})
        assert len(outcome.losses) == steps_left
        assert names(target) == ["latest", *steps(6)]


def test_auto_starts_afresh_where_there_is_nothing_but_a_named_place_must_exist(tmp_path: Path) -> None:
    outcome = fit(0, 1, {"work_dir": tmp_path / "new", "checkpoint": {"resume": "auto"}})
    assert outcome.steps == 12
    with refused(CheckpointError, tmp_path / "nowhere"):
        fit(0, 1, {"work_dir": tmp_path / "b", "checkpoint": {"resume": str(tmp_path / "nowhere")}})


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    settings = {"work_dir": tmp_path, "train": {"max_epochs": 1}}
    first = fit(0, 1, {**settings, "batch": {"total": 2}}, samples=24, stop_at=4)
    second = fit(0, 1, {**settings, "batch": {"total": 4}, "checkpoint": {"resume": "auto"}}, samples=24)
    assert sorted(first.numbers + second.numbers) == list(range(24))
    settings["work_dir"] = tmp_path / "uneven"
    fit(0, 1, {**settings, "batch": {"total": 2}}, samples=24, stop_at=3)
    with refused(TrainingError, "6 samples", "epoch 1", "batch.total=4", "batch.total=2"):
        fit(0, 1, {**settings, "batch": {"total": 4}, "checkpoint": {"resume": "auto"}}, samples=24)


def test_at_the_end_of_an_epoch_any_batch_size_may_follow(tmp_path: Path) -> None:
    first = fit(0, 1, {"work_dir": tmp_path, "train": {"max_steps": 3}}, samples=10)
    settings = {"work_dir": tmp_path, "train": {"max_steps": 5}, "batch": {"total": 5}}
    second = fit(0, 1, {**settings, "checkpoint": {"resume": "auto"}}, samples=10)
    assert sorted(first.numbers) == sorted(second.numbers) == list(range(10))


def test_another_optimizer_is_refused_because_its_state_does_not_fit(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path})
    with refused(CheckpointError, "AdamW", "optim.type", "SGD"):
        fit(0, 1, {"work_dir": tmp_path, "optim": {"type": "SGD"}, "checkpoint": {"resume": "auto"}})


def test_a_model_that_does_not_fit_is_shown_tensor_by_tensor(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path})
    model = Classifier()
    model.out = torch.nn.Linear(16, 7)
    model.extra = torch.nn.Linear(3, 3, bias=False)
    checkpoint = {"resume": "auto"}
    runner = Runner(model=model, data=Points(4), work_dir=tmp_path, train={"max_steps": 20}, checkpoint=checkpoint)
    with runner, pytest.raises(CheckpointError) as caught:
        runner.train()
    lines = str(caught.value).splitlines()
    assert str(tmp_path) in lines[0]
    assert [line.split() for line in lines[2:-1]] == [
        ["model.extra.weight", "-", "(3,", "3)"],
        ["model.out.bias", "(4,)", "(7,)"],
        ["model.out.weight", "(4,", "16)", "(7,", "16)"],
    ]


def test_a_hook_state_that_cannot_be_written_is_told_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    class Odd(Trace):
        def state(self) -> dict[str, Any]:
            return {"odd": object()}

    fit(0, 1, {"work_dir": tmp_path, "train": {"max_epochs": 1}})
    settings = {"work_dir": tmp_path, "checkpoint": {"resume": "auto"}, "hooks": [Odd()]}
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        fit(0, 1, settings)
    assert names(tmp_path) == ["latest", *steps(6)]


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals(asked.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == ["SIGTERM", "Ctrl-C"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_was_ignored_at_the_start_stays_so() -> None:
    asked: list[str] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals(asked.append):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["SIGTERM"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_during_training_saves_and_names_itself(tmp_path: Path) -> None:
    class Interrupt(Hook):
        def before_step(self, runner: Runner) -> None:
            if runner.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    outcome = fit(0, 1, {"work_dir": tmp_path, "hooks": [Interrupt()]})
    assert (outcome.steps, outcome.reason) == (5, "SIGTERM")
    assert names(tmp_path) == ["latest", *steps(5)]


@pytest.mark.parametrize("blocked", [False, True])
def test_what_became_of_a_save_that_was_under_way_when_a_run_broke_off_is_told(tmp_path: Path, blocked: bool) -> None:
    class Break(Hook):
        def after_save(self, runner: Runner) -> None:
            raise KeyboardInterrupt

    if blocked:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / ".step-00000002.tmp").write_text("a file where the folder should be")
    settings = {"train": {"max_steps": 9}, "checkpoint": {"every": 2, "async_save": True}}
    logged = {"log": {"console": "none", "sinks": ["jsonl"]}}
    with pytest.raises(KeyboardInterrupt):
        fit(0, 1, {"work_dir": tmp_path, "hooks": [Break()], **settings, **logged})
    events = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    told = [event for event in events if event["kind"] in ("save", "message")]
    if blocked:
        assert not missing(told[-1]["data"]["text"], "step-00000002")
    else:
        assert told[-1]["data"]["path"].endswith("step-00000002")
        assert names(tmp_path) == ["latest", *steps(2)]


def test_a_wrong_setting_is_found_before_a_checkpoint_is_looked_for(tmp_path: Path) -> None:
    with refused(ConfigError, key="checkpoint.best"):
        fit(0, 1, {"work_dir": tmp_path, "checkpoint": {"best": {}, "resume": "auto"}})


def test_loading_in_worker_processes_changes_nothing_about_a_resume(tmp_path: Path) -> None:
    def run(name: str, **sections: Any) -> list[float]:
        trace, loader = Trace(), DataLoader(Points(10), batch_size=4, shuffle=True, num_workers=1)
        settings = {"work_dir": tmp_path / name, "device": "cpu", "log": {"console": "none", "sinks": []}}
        with Runner(model=Classifier(dropout=0.3), data=loader, hooks=[trace], **settings, **sections) as runner:
            runner.train()
        return trace.losses

    whole = run("whole", train={"max_steps": 6})
    first = run("parts", train={"max_steps": 4})
    second = run("parts", train={"max_steps": 6}, checkpoint={"resume": "auto"})
    assert first + second == whole


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_saves_that_fail_one_after_another_end_the_run(tmp_path: Path, most: int, background: bool) -> None:
    steps = []

    class Blocks(Hook):
        def before_save(self, runner: Runner) -> None:
            steps.append(runner.step)
            if runner.step != 2:  # one in between that succeeds begins the count anew
                (tmp_path / "checkpoints" / f".step-{runner.step:08d}.tmp").write_text("in the way")

    sections = {"checkpoint": {"every": 1, "max_failures": most, "async_save": background}, "hooks": [Blocks()]}
    with refused(CheckpointError, "step-0000", most + 1, "checkpoint.max_failures", "checkpoint.resume=auto"):
        fit(0, 1, {"work_dir": tmp_path, "train": {"max_steps": 9}, **sections})
    failed = 1 if most == 0 else 3 + most
    assert failed <= steps[-1] <= failed + background


@pytest.mark.parametrize("way", ["file", "read-only"])
def test_a_folder_that_takes_no_checkpoints_is_refused_before_the_first_step(tmp_path: Path, way: str) -> None:
    steps = []

    class Counts(Hook):
        def before_step(self, runner: Runner) -> None:
            steps.append(runner.step)

    if way == "file":
        (tmp_path / "checkpoints").write_text("not a folder")
    else:
        (tmp_path / "checkpoints").symlink_to("/sys/kernel")  # where not even root writes
    with refused(CheckpointError, tmp_path / "checkpoints"):
        fit(0, 1, {"work_dir": tmp_path, "hooks": [Counts()]})
    assert steps == []
    if way == "file":  # a run that saves nothing does not ask
        fit(0, 1, {"work_dir": tmp_path, "hooks": [Counts()], "checkpoint": {"last": False}})
        assert steps


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs Linux's /sys")
def test_a_work_dir_that_cannot_be_written_to_is_named() -> None:
    with refused(ConfigError, "'/sys/kernel'", "Permission denied", key="work_dir"):
        fit(0, 1, {"work_dir": "/sys/kernel"})


def _text_run(folder: Path, **sections: Any) -> None:
    settings: dict[str, Any] = {
        "model": {"type": "gpt", "vocab_size": 300, "dim": 8, "layers": 1, "heads": 1, "seq_len": 16},
        "data": {
            "type": "text",
            "path": str(folder / "texts"),
            "vocab_size": 280,
            "seq_len": 16,
            "cache": str(folder / "cache"),
        },
        "batch": {"total": 4},
        "work_dir": folder / "run",
        "log": {"console": "none", "sinks": ["jsonl"]},
        "plan": "off",
        "device": "cpu",
    }
    with Runner(**{**settings, **sections}) as runner:
        runner.train()


def test_a_tokenizer_that_was_trained_anew_on_changed_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the cat sat on the mat. " * 60, encoding="utf-8")
    _text_run(tmp_path, train={"max_steps": 2})
    going_on: dict[str, Any] = {"train": {"max_steps": 4}, "checkpoint": {"resume": "auto"}}
    (tmp_path / "texts" / "b.txt").write_text("quick foxes jump over lazy dogs! " * 90, encoding="utf-8")
    with refused(CheckpointError, "`data.tokenizer`", "`checkpoint.partial`"):
        _text_run(tmp_path, **going_on)
    partial = {"resume": "auto", "partial": ["model.*"]}
    _text_run(tmp_path, **{**going_on, "checkpoint": partial})  # said, and done


def test_another_number_of_samples_within_an_epoch_is_told(tmp_path: Path) -> None:
    def run(samples: int, **sections: Any) -> None:
        settings: dict[str, Any] = {"work_dir": tmp_path, "log": {"console": "none", "sinks": ["jsonl"]}}
        settings |= {"batch": {"total": 4}, "device": "cpu"}
        with Runner(model=Classifier, data=Points(samples), **{**settings, **sections}) as runner:
            runner.train()

    run(24, train={"max_epochs": 2, "stop_after": 2})
    run(28, train={"max_epochs": 2}, checkpoint={"resume": "auto"})
    events = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(not missing(event["data"].get("text", ""), "24 samples", "28") for event in events)
