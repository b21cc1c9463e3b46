from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.config.train import LogConfig
from plait.monitor import build_monitor


def names(config: dict[str, Any], work_dir: Path, rank: int = 0) -> list[str]:
    with build_monitor(LogConfig.model_validate(config), work_dir, rank) as monitor:
        return [type(sink).__name__ for sink in monitor.sinks]


def test_rank_0_has_the_console_and_every_sink(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    asked = {"sinks": ["csv", "html", "jsonl", "tensorboard"]}
    found = names(asked, tmp_path / "a" / "new" / "folder")
    assert found[:2] == ["ConsoleSink", "JsonlSink"]
    assert sorted(found[2:]) == ["CsvSink", "HtmlSink", "TensorBoardSink"]


def test_other_ranks_keep_only_their_record(tmp_path: Path) -> None:
    assert names({"sinks": ["csv", "jsonl"]}, tmp_path, rank=1) == ["JsonlSink"]
    assert (tmp_path / "events-rank1.jsonl").exists()
    assert names({"sinks": ["csv"]}, tmp_path, rank=1) == []


def test_a_report_brings_the_record_it_is_drawn_from(tmp_path: Path) -> None:
    assert names({"sinks": ["html"], "console": "none"}, tmp_path) == ["JsonlSink", "HtmlSink"]


def test_two_runs_of_one_folder_make_one_report(tmp_path: Path, make_run: Any) -> None:
    config = LogConfig.model_validate({"sinks": ["html"], "console": "none"})
    for run in (make_run(0, 5, segment="zero3 · 2 ranks", end=False), make_run(5, 9, segment="ddp · 2 ranks")):
        with build_monitor(config, tmp_path, 0) as monitor:
            for event in run:
                monitor.emit(event)
        report = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "zero3 · 2 ranks" in report, "a run that was cut short has a report too"
    assert "resumed at step 5 as ddp · 2 ranks" in report


def test_the_room_works_without_torch_and_pays_for_rich_only_on_a_terminal() -> None:
    code = (
        "import importlib, pkgutil, sys, plait.monitor as room\n"
        "names = [m.name for m in pkgutil.iter_modules(room.__path__, 'plait.monitor.')]\n"
        "[importlib.import_module(name) for name in names if name != 'plait.monitor.progress']\n"
        "assert len(names) > 5\n"
        "print(sorted({'torch', 'rich', 'tensorboard', 'wandb'} & set(sys.modules)))\n"
        "import plait.monitor.progress\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
