from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from plait.monitor.events import Event, EventKind
from plait.monitor.files import CsvSink


def train(step: int, **data: Any) -> Event:
    return Event(EventKind.TRAIN, step, 1, data, 100.0 + step)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_kind_of_measurement_has_its_file(tmp_path: Path, make_run: Any) -> None:
    sink = CsvSink(tmp_path)
    run = make_run(0, 4)
    for event in run:
        sink.write(event)
    sink.close()
    found = rows(tmp_path / "train.csv")
    assert [float(row["loss"]) for row in found] == [e.data["loss"] for e in run if e.kind is EventKind.TRAIN]
    assert not {"eta", "by_epoch", "max_steps"} & set(found[0])
    (validated,) = rows(tmp_path / "validate.csv")
    assert (validated["step"], validated["accuracy/top1"], validated["batches"]) == ("4", "0.5", "5.0")
    assert not (tmp_path / "test.csv").exists()


def test_a_column_that_appears_later_is_empty_before(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    sink.write(train(1, loss=3.0))
    sink.write(train(2, loss=2.0, grad_norm=1.5))
    sink.write(train(3, loss=math.nan))
    found = rows(tmp_path / "train.csv")
    assert [row["grad_norm"] for row in found] == ["", "1.5", ""]
    assert [row["loss"] for row in found] == ["3.0", "2.0", "nan"]
    assert [row["timestamp"] for row in found] == ["101.0", "102.0", "103.0"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_a_resumed_run_keeps_the_rows_and_columns_that_are_there(tmp_path: Path) -> None:
    first = CsvSink(tmp_path)
    first.write(train(1, loss=3.0, grad_norm=0.5))
    first.close()
    second = CsvSink(tmp_path)
    second.write(train(2, mfu=0.4, loss=2.5))
    second.close()
    assert [(row["step"], row["loss"], row["grad_norm"], row["mfu"]) for row in rows(tmp_path / "train.csv")] == [
        ("1", "3.0", "0.5", ""),
        ("2", "2.5", "", "0.4"),
    ]


def test_a_row_torn_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("step,epoch,timestamp,loss\n1,1,101.0,3.0\n2,1,10")
    sink = CsvSink(tmp_path)
    sink.write(train(3, loss=2.0))
    assert rows(tmp_path / "train.csv")[-1] == {"step": "3", "epoch": "1", "timestamp": "103.0", "loss": "2.0"}
