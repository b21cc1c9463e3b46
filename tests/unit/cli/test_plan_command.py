"""`plait plan`: what a run will take, its schedule as a picture, DeepSpeed's tables, and the search."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.refusals import missing

from plait.cli.main import main
from plait.plan.simulate import TimeBudget

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
    assert not missing(capsys.readouterr().out, "picture.svg", "interleaved_1f1b", "2 ranks", "6 micro-batches")
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
    assert not missing(capsys.readouterr().err, "- strategy.layout.pp", "1", "`strategy.layout.pp: 2`")
    assert not (tmp_path / "schedule.svg").exists()


SMALL = """
model: {type: gpt, vocab_size: 64, dim: 32, layers: 2, heads: 2, seq_len: 16}
batch: {total: 8}
train: {max_steps: 100}
"""


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    (tmp_path / "run.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return call(monkeypatch, "run.yaml", *words)


def test_a_plan_says_that_it_fits_and_writes_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("strategy.zero=2", "--gpus", "8", "--gpu", "h100", "--out", "plan.json")
    assert planned(tmp_path, monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert not missing(said, "8 × h100-80g", "dp_shard 8", "ZeRO 2", "100 steps")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["fits"] is True
    assert written["ranks"]["every rank"]["peak.backward"] > 0
    for phase in ("load", "optimizer init", "save"):
        assert f"\n{phase} " in said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_for_images_is_planned_for_a_gpu_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    text = "model: {type: resnet, depth: 18, classes: 10, stem: cifar}\ndata: {type: cifar10, path: .}\n"
    (tmp_path / "run.yaml").write_text(f"{text}batch: {{total: 8}}\ntrain: {{max_steps: 1}}\nprecision: {precision}\n")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run.yaml", "--gpu", "h100") == 0
    assert " images/s" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_says_so_with_its_exit_code_and_shows_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TimeBudget, "over", False)  # however busy this machine is
    monkeypatch.setattr(TimeBudget, "half_over", False)
    words = ("model.dim=4096", "model.layers=20", "strategy.zero=2", "strategy.recompute=full")
    assert planned(tmp_path, monkeypatch, *words, "--gpus", "8", "--gpu", "v100-16g") == 1
    said = capsys.readouterr().out
    assert re.search(r"strategy\.offload\.optimizer=cpu: .*\n +strategy\.zero=3: .*\n", said)
    assert not missing(said.splitlines()[-1], "strategy.zero=3", "GiB")


def test_a_search_for_what_fits_that_has_no_time_left_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TimeBudget, "over", True)
    words = ("model.dim=4096", "model.layers=20", "strategy.zero=2", "strategy.recompute=full")
    assert planned(tmp_path, monkeypatch, *words, "--gpus", "8", "--gpu", "v100-16g") == 1
    said = capsys.readouterr().out
    assert re.search(r"\bstrategy\.zero=3: .*\b40 s\b", said)
    assert not missing(said.splitlines()[-1], "40 s", "`strategy.zero=3`")
    assert "--search" not in said


def test_a_search_shows_the_best_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, monkeypatch, "--search", "--gpus", "2", "--gpu", "h100", "--out", "ways.json") == 0
    rows = json.loads((tmp_path / "ways.json").read_text())
    assert rows[0]["reason"] == ""
    assert "tokens/s" in capsys.readouterr().out


def test_an_unknown_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, monkeypatch, "--gpu", "z9000") == 2
    assert "z9000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--search --timeline x.svg", "--states-only --out x.json", "--schedule --search", "--schedule --gpu h100"]
)
def test_an_option_that_says_nothing_beside_another_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mode, idle, *_ = words.split()
    assert planned(tmp_path, monkeypatch, *words.split()) == 2
    assert not missing(capsys.readouterr().err, f"- {idle}: ", mode)


def test_a_strategy_that_is_still_to_be_found_is_not_planned_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, monkeypatch, "strategy=auto") == 2
    assert "--search" in capsys.readouterr().err


def test_states_only_prints_deepspeeds_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, monkeypatch, "--states-only", "--gpus", "2") == 0
    assert "offload_optimizer" in capsys.readouterr().out


def test_a_timeline_draws_the_memory_of_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(tmp_path, monkeypatch, "--gpu", "h100", "--timeline", "step.svg") == 0
    picture = ElementTree.fromstring((tmp_path / "step.svg").read_text())
    drawn = {each.get("fill") for each in picture.iter() if each.tag.endswith("polygon")}
    named = [each.get("fill") for each in picture.iter() if each.tag.endswith("rect")]
    assert len(named) == 8
    assert drawn <= set(named)
    assert len(drawn) >= 7  # one process has nothing to reduce
