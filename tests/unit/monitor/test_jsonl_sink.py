from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.refusals import refused

from plait.errors import DataError
from plait.monitor.events import Event, EventKind
from plait.monitor.files import JsonlSink, read_events


def strict(line: str) -> Any:
    """Parse as JSON is defined, not as Python widens it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_lines_are_valid_json_whatever_was_measured(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    data = {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "lr": 1e-3, "count": np.int64(3),
            "scale": np.float32("nan"), "path": tmp_path, "note": "zero3 · 2\nranks"}  # fmt: skip
    sink.write(Event(EventKind.TRAIN, 7, 1, data, 12.5))
    (line,) = (tmp_path / "events-rank0.jsonl").read_text(encoding="utf-8").splitlines()  # before any close
    record = strict(line)
    assert {key: record[key] for key in ("kind", "step", "epoch", "time", "rank")} == {
        "kind": "train", "step": 7, "epoch": 1, "time": 12.5, "rank": 0,
    }  # fmt: skip
    assert record["data"]["loss"] == "nan"
    assert record["data"]["grad_norm"] == "inf"
    assert record["data"]["low"] == "-inf"
    assert record["data"]["count"] == 3
    assert record["data"]["scale"] == "nan"
    assert record["data"]["note"] == "zero3 · 2\nranks"
    sink.close()


def test_a_resumed_run_continues_the_file(tmp_path: Path, make_run: Any) -> None:
    runs = make_run(0, 4), make_run(4, 9)
    for run in runs:
        sink = JsonlSink(tmp_path, 0)
        for event in run:
            sink.write(event)
        sink.close()
    found = read_events([tmp_path / "events-rank0.jsonl"])
    assert [(e.kind, e.step, e.time) for e in found] == [(e.kind, e.step, e.time) for run in runs for e in run]
    assert [e.data["loss"] for e in found if e.kind is EventKind.TRAIN] == [
        e.data["loss"] for run in runs for e in run if e.kind is EventKind.TRAIN
    ]


def test_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    sink.write(Event(EventKind.VALIDATE, 1, 1, {"metrics": {"loss": math.nan}}))
    (event,) = read_events([tmp_path / "events-rank0.jsonl"])
    assert math.isnan(event.data["metrics"]["loss"])
    sink.close()


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    sink = JsonlSink(tmp_path, 0)
    sink.write(Event(EventKind.TRAIN, 1, 1, {"loss": 2.0}))
    sink.close()
    path.write_text(path.read_text() + '{"kind": "train", "st')
    sink = JsonlSink(tmp_path, 0)
    sink.write(Event(EventKind.TRAIN, 2, 1, {"loss": 1.5}))
    sink.close()
    assert [event.step for event in read_events([path])] == [1, 2]


def test_other_ranks_add_only_what_they_say(tmp_path: Path) -> None:
    for rank in (0, 3):
        sink = JsonlSink(tmp_path, rank)
        sink.write(Event(EventKind.TRAIN, 1, 1, {"loss": 2.0}))
        sink.write(Event(EventKind.MESSAGE, 1, 1, {"level": "warning", "text": f"from {rank}"}))
        sink.close()
    events = read_events(sorted(tmp_path.glob("*.jsonl")))
    assert [(e.kind, e.data.get("rank")) for e in events] == [
        (EventKind.TRAIN, None),
        (EventKind.MESSAGE, None),
        (EventKind.MESSAGE, 3),
    ]


@pytest.mark.parametrize("line", ["[]", "3", '{"kind": "a later kind", "step": 1}', "", "not json"])
def test_lines_it_does_not_know_are_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    assert read_events([path]) == []


@pytest.mark.parametrize("key", ["step", "epoch", "time"])
@pytest.mark.parametrize("value", [None, "3", [1]])
def test_an_event_that_says_not_when_it_was_is_named_with_its_line(tmp_path: Path, key: str, value: Any) -> None:
    sink = JsonlSink(tmp_path, 0)
    for step in range(2):
        sink.write(Event(EventKind.TRAIN, step, 0, {"loss": 1.0}))
    sink.close()
    path = tmp_path / "events-rank0.jsonl"
    first, second = path.read_text(encoding="utf-8").splitlines()
    for changed in ({**json.loads(second), key: value}, {k: v for k, v in json.loads(second).items() if k != key}):
        path.write_text(f"{first}\n{json.dumps(changed)}\n", encoding="utf-8")
        with refused(DataError, f"{path}, line 2", key):
            list(read_events([path]))
