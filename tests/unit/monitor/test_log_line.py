from __future__ import annotations

from datetime import datetime
from typing import Any

from plait.monitor.console import event_line
from plait.monitor.events import Event, EventKind

AT = datetime(2023, 7, 3, 13, 4, 17).timestamp()
BY_EPOCH = {
    "lr": 1e-3 / 3,
    "loss": 6.18868,
    "time": 0.40731,
    "data_time": 0.03349,
    "memory": 970.2,
    "eta": 794.6,
    "step_in_epoch": 10,
    "steps_per_epoch": 196,
    "max_steps": 1960,
    "max_epochs": 10,
    "by_epoch": True,
    "samples_per_s": 314.0,
    "skipped": 0,
}


def line(kind: EventKind, data: dict[str, Any], *, step: int = 10, epoch: int = 1, **how: Any) -> str | None:
    return event_line(Event(kind, step, epoch, data, AT), **how)


def test_a_training_line_is_the_classic_one() -> None:
    assert line(EventKind.TRAIN, BY_EPOCH) == (
        "07/03 13:04:17 - plait - INFO - Epoch(train)  [1][ 10/196]  lr: 3.3333e-04  eta: 0:13:14  "
        "time: 0.4073  data_time: 0.0335  memory: 970  loss: 6.1887"
    )


def test_what_was_also_measured_follows_the_loss() -> None:
    more = {"grad_norm": 1.23449, "tokens_per_s": 12_340.0, "mfu": 0.4121, "loss_scale": 65536.0, "skipped": 2}
    text = line(EventKind.TRAIN, {**BY_EPOCH, **more})
    assert text is not None
    assert text.endswith("loss: 6.1887  grad_norm: 1.2345  tokens/s: 12.3k  mfu: 41.2%  loss_scale: 65536  skipped: 2")


def test_brackets_of_all_epochs_end_in_one_column() -> None:
    first = line(EventKind.TRAIN, BY_EPOCH, epoch=9)
    last = line(EventKind.TRAIN, {**BY_EPOCH, "step_in_epoch": 196}, epoch=10)
    assert first is not None
    assert last is not None
    assert "Epoch(train)  [9][ 10/196]" in first
    assert "Epoch(train) [10][196/196]" in last


def test_a_run_counted_in_steps_says_iter() -> None:
    data = {**BY_EPOCH, "by_epoch": False, "steps_per_epoch": None, "max_epochs": None, "max_steps": 1000}
    text = line(EventKind.TRAIN, data)
    assert text is not None
    assert "INFO - Iter(train) [  10/1000]  lr: 3.3333e-04  eta:" in text


def test_a_validation_line_has_its_metrics() -> None:
    data = {"metrics": {"loss": 2.30251, "accuracy/top1": 0.51239}, "batches": 5, "time": 1.5}
    head = "07/03 13:04:17 - plait - INFO - "
    tail = "[5/5]  loss: 2.3025  accuracy/top1: 0.5124  time: 1.5000"
    assert line(EventKind.VALIDATE, data, max_epochs=10) == f"{head}Epoch(val)  [1]{tail}"
    assert line(EventKind.VALIDATE, data, by_epoch=False) == f"{head}Iter(val) {tail}"
    assert line(EventKind.TEST, data) == f"{head}Epoch(test)  {tail}"


def test_numbers_that_are_none_are_named_not_hidden() -> None:
    text = line(EventKind.TRAIN, {**BY_EPOCH, "loss": float("nan"), "grad_norm": float("inf"), "eta": float("inf")})
    assert text is not None
    assert "loss: nan  grad_norm: inf" in text
    assert "eta: ?" in text


def test_a_tiny_loss_keeps_its_digits() -> None:
    text = line(EventKind.TRAIN, {**BY_EPOCH, "loss": 1.23456e-5})
    assert text is not None
    assert text.endswith("loss: 1.2346e-05")


def test_a_message_carries_its_level_and_a_save_its_cost() -> None:
    warning = line(EventKind.MESSAGE, {"level": "warning", "text": "slow disk"})
    assert warning == "07/03 13:04:17 - plait - WARNING - slow disk"
    saved = line(EventKind.SAVE, {"path": "runs/a/step-10", "seconds": 3.21, "bytes": 1.5 * 2**30})
    assert saved == "07/03 13:04:17 - plait - INFO - Saved runs/a/step-10  (1.5 GiB in 3.21 s)"


def test_starts_and_ends_have_no_line() -> None:
    assert line(EventKind.RUN_START, {}) is None
    assert line(EventKind.RUN_END, {}) is None
