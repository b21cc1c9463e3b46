"""Hooks: when they run, what they keep, and the ones that come with Plait."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.toys import Classifier, Points, Trace
from tests.refusals import refused

from plait import Runner
from plait.errors import ConfigError
from plait.trainer import Hook
from plait.trainer.hooks import POINTS


def make(tmp_path: Path, **sections: Any) -> Runner:
    settings: dict[str, Any] = {
        "model": Classifier(),
        "data": Points(8),
        "train": {"max_epochs": 2},
        "batch": {"total": 4},
        "optim": {"type": "SGD", "lr": 0.1},
        "work_dir": tmp_path / "run",
        "log": {"console": "none", "sinks": []},
        "device": "cpu",
    }
    return Runner(**{**settings, **sections})


class Recorder(Hook):
    """Writes every point it is called at into a shared list."""

    def __init__(self, calls: list[str], name: str = "recorder", priority: int = 50) -> None:
        self.calls, self.name, self.priority = calls, name, priority

    def state(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restored = state["calls"]


def _record(point: str) -> Any:
    def call(self: Recorder, *_: Any) -> None:
        self.calls.append(f"{self.name} {point}" if self.name != "recorder" else point)

    return call


for _point in POINTS:
    setattr(Recorder, _point, _record(_point))


def test_points_come_in_a_fixed_order(tmp_path: Path) -> None:
    calls: list[str] = []
    runner = make(tmp_path, val_data=Points(3), checkpoint={"every": 1}, hooks=[Recorder(calls)])
    runner.train()
    runner.test()
    step = ["before_step", "after_step"]
    rest = ["after_epoch", "before_validate", "after_validate", "before_save", "after_save"]
    epoch = ["before_epoch", *step, *step, *rest]
    assert calls == ["before_run", *epoch, *epoch, "after_run", "before_test", "after_test"]


def test_counting_steps_validates_between_steps(tmp_path: Path) -> None:
    calls: list[str] = []
    make(tmp_path, val_data=Points(3), train={"max_steps": 2, "val_every": 1}, hooks=[Recorder(calls)]).train()
    step = ["before_step", "after_step", "before_validate", "after_validate"]
    assert calls == [
        "before_run",
        "before_epoch",
        *step,
        *step,
        "after_epoch",
        "after_run",
        "before_save",
        "after_save",
    ]


def test_a_lower_priority_number_goes_first_and_equal_ones_in_the_order_given(tmp_path: Path) -> None:
    calls: list[str] = []
    hooks = [Recorder(calls, "late", 90), Recorder(calls, "b", 50), Recorder(calls, "c", 50), Recorder(calls, "a", 10)]
    make(tmp_path, train={"max_steps": 1}, hooks=hooks).train()
    assert calls[:4] == ["a before_run", "b before_run", "c before_run", "late before_run"]
    assert calls[-4:] == ["a after_save", "b after_save", "c after_save", "late after_save"]


class Counter(Hook):
    """Counts steps in a number and in a tensor."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.total = torch.full((3,), float(start))

    def after_step(self, runner: Runner, result: Any) -> None:
        self.count += 1
        self.total += 1

    def tensors(self, runner: Runner) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_state_and_tensors_are_saved_and_restored_each_to_its_own_hook(tmp_path: Path) -> None:
    make(tmp_path, hooks=[Counter(), Counter(100)]).train()
    first, second = Counter(), Counter()
    train = {"max_epochs": 3}
    make(tmp_path, hooks=[first, second], train=train, checkpoint={"resume": "auto"}).train()
    assert (first.count, second.count) == (6, 106)
    assert first.total.tolist() == [6.0] * 3
    assert second.total.tolist() == [106.0] * 3


def test_a_hook_that_is_gone_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, hooks=[Counter()]).train()
    log = {"console": "plain", "sinks": []}
    make(tmp_path, train={"max_epochs": 3}, checkpoint={"resume": "auto"}, log=log).train()
    assert "'Counter'" in capsys.readouterr().out


def test_a_hook_may_come_in_the_description(tmp_path: Path) -> None:
    described = {"type": "import", "target": f"{__name__}:Counter", "args": {"start": 7}, "priority": 3}
    runner = make(tmp_path, hooks=[described])
    runner.train()
    (hook,) = runner.hooks.hooks
    assert (hook.count, hook.priority) == (11, 3)  # type: ignore[attr-defined]


# ---- the moving average


class Weights(Hook):
    """Keeps the weights after every step, and those that a validation sees."""

    priority = 45  # after the average has been swapped in

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def after_step(self, runner: Runner, result: Any) -> None:
        self.after.append(_copy(runner))

    def before_validate(self, runner: Runner) -> None:
        self.validated.append(_copy(runner))


def _copy(runner: Runner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in runner.engine.model.state_dict().items()}


@pytest.mark.parametrize("every", [1, 2])
def test_the_average_equals_the_one_by_hand_and_is_what_validation_sees(tmp_path: Path, every: int) -> None:
    decay, model, weights = 0.7, Classifier(), Weights()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [{"type": "ema", "decay": decay, "every": every}, weights]
    make(tmp_path, model=model, val_data=Points(3), hooks=hooks, train={"max_epochs": 1}).train()
    for step, after in enumerate(weights.after, start=1):
        if step % every == 0:
            keep = decay**every
            expected = {name: keep * value + (1 - keep) * after[name] for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(weights.validated[0][name], value)
        assert torch.equal(model.state_dict()[name], weights.after[-1][name])  # training goes on with the weights


def test_the_average_goes_on_after_a_resume(tmp_path: Path) -> None:
    ema = {"type": "ema", "decay": 0.8}
    whole, first, second = Weights(), Weights(), Weights()
    common: dict[str, Any] = {"val_data": Points(3)}
    make(tmp_path, **common, hooks=[ema, whole], work_dir=tmp_path / "whole").train()
    make(tmp_path, **common, hooks=[ema, first], train={"max_epochs": 1}).train()
    make(tmp_path, **common, hooks=[ema, second], checkpoint={"resume": "auto"}, model=Classifier(seed=99)).train()
    for name, value in whole.validated[-1].items():
        assert torch.equal(second.validated[-1][name], value)


def test_a_test_uses_the_average_too(tmp_path: Path) -> None:
    runner = make(tmp_path, val_data=Points(30), hooks=[{"type": "ema", "decay": 0.9}])
    runner.train()
    assert runner.test() == runner.validate()


# ---- stopping early


class Scores(Hook):
    """Replaces what a validation measured."""

    priority = 10

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        metrics["score"] = self.scores.pop(0)  # type: ignore[index]


@pytest.mark.parametrize(
    ("mode", "min_delta", "scores", "epochs"),
    [
        ("max", 0.0, [1, 2, 2, 2, 9], 4),  # two without a gain: one more than `patience`
        ("max", 0.0, [1, 1, 2, 2, 3], 5),
        ("min", 0.5, [3.0, 2.6, 2.6, 9, 9], 3),
        ("min", 0.5, [3.0, 2.5, 2.4, 2.3, 9], 4),
        ("max", 0.0, [1, float("nan"), float("nan"), 9, 9], 3),
    ],
)
def test_training_stops_once_patience_is_used_up(
    tmp_path: Path, mode: str, min_delta: float, scores: list[float], epochs: int
) -> None:
    stop = {"type": "early_stop", "metric": "score", "mode": mode, "patience": 1, "min_delta": min_delta}
    train = {"max_epochs": 5}
    runner = make(tmp_path, val_data=Points(2), hooks=[Scores(list(scores)), stop], train=train)
    runner.train()
    assert runner.epoch == epochs
    assert runner.step == 2 * epochs  # not one step more
    if epochs < 5:
        assert "score" in str(runner.stop_reason)


def test_patience_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    stop = {"type": "early_stop", "metric": "score", "mode": "max", "patience": 2}
    common: dict[str, Any] = {"val_data": Points(2)}
    make(tmp_path, **common, hooks=[Scores([5, 4]), stop], train={"max_epochs": 2}).train()
    settings = {"train": {"max_epochs": 9}, "checkpoint": {"resume": "auto"}}
    runner = make(tmp_path, **common, **settings, hooks=[Scores([4, 4, 9]), stop])
    runner.train()
    assert runner.epoch == 4


def test_a_test_does_not_count_as_a_validation(tmp_path: Path) -> None:
    stop = {"type": "early_stop", "patience": 1}
    runner = make(tmp_path, val_data=Points(2), hooks=[stop, trace := Trace()])
    for _ in range(5):
        runner.test()
    runner.train()
    assert runner.stop_reason is None
    assert len(trace.metrics) == 2


def test_a_metric_that_nobody_measures_is_named_with_those_that_are(tmp_path: Path) -> None:
    stop = {"type": "early_stop", "metric": "acuracy"}
    with refused(ConfigError, "'acuracy'", "loss", key="hooks.early_stop.metric"):
        make(tmp_path, val_data=Points(2), hooks=[stop]).train()
    best = {"best": {"metric": "f1", "mode": "max"}}
    with refused(ConfigError, "'f1'", "loss", key="checkpoint.best.metric"):
        make(tmp_path, val_data=Points(2), checkpoint=best, work_dir=tmp_path / "other").train()
