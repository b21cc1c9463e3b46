"""`plait plan --schedule` draws a pipeline."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plait.cli.main import main

RUN = """
model: {type: llama, vocab_size: 32, dim: 16, layers: 4, heads: 2, seq_len: 8}
batch: {micro: 1, accumulation: 6}
strategy: {layout: {pp: 2}, pipeline: {schedule: interleaved_1f1b}}
"""


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plait", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_schedule_of_a_run_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run.yaml", "--schedule", "--out", "picture.svg") == 0
    assert "picture.svg: interleaved_1f1b over 2 ranks, 6 micro-batches, " in capsys.readouterr().out
    picture = ElementTree.fromstring((tmp_path / "picture.svg").read_text())
    boxes = [each for each in picture.iter() if each.get("class") == "box"]
    assert len(boxes) == 2 * 4 * 6  # forward and backward, four stages, six micro-batches


def test_a_run_without_a_pipeline_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    changes = ("strategy.layout.pp=1", "strategy.pipeline.schedule=1f1b")
    assert call(monkeypatch, "run.yaml", *changes, "--schedule") == 2
    assert "no pipeline" in capsys.readouterr().err
    assert not (tmp_path / "schedule.svg").exists()
