"""`plait profile` on a real, tiny run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing

from plait.cli.main import main


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(sys, "argv", ["plait", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_profile_shows_tables_and_leaves_a_page_and_saves_no_checkpoint(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The description ends after six steps and saves; a profile goes on as long as it must, and does not.
    place.describe(plan="off", checkpoint={"every": 2})
    assert call(monkeypatch, place.folder, "profile", "run.yaml", "--steps", "2", "profile.start=6") == 0
    shown = capsys.readouterr().out
    assert not missing(shown, "100.0%", "blocks.*")
    folder = place.folder / "run-profile"
    found = {path.name for path in folder.iterdir()}
    assert {"profile.html", "profile.json", "step.svg", "trace-rank0.json"} <= found
    assert "checkpoints" not in found or not list((folder / "checkpoints").glob("step-*"))
    assert not (place.folder / "run").exists()
    assert json.loads((folder / "profile.json").read_text())["time"]["steps"] == 2


def test_ranks_are_started_and_one_of_them_tells(place: Any) -> None:
    place.describe(plan="off")
    ended = place.run("profile", "run.yaml", "strategy.zero=1", "profile.start=4", "-s", "1", "-n", "2", "-o", "there")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("2 × CPU: dp_shard 2") == 1
    assert {"trace-rank0.json", "trace-rank1.json"} <= {path.name for path in (place.folder / "there").iterdir()}


def test_what_is_wrong_is_told_in_plain_words(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, place.folder, "profile", "run.yaml", "profile.start=2") == 2
    assert "profile.start" in capsys.readouterr().err
    assert call(monkeypatch, place.folder, "profile", "run.yaml", "--nproc", "none") == 2
    assert "--nproc" in capsys.readouterr().err
    place.describe(plan="off", train={"max_epochs": 1}, batch={"total": 2000}, val_data=None)
    assert call(monkeypatch, place.folder, "profile", "run.yaml") == 2
    assert not missing(capsys.readouterr().err, "profile.start", "profile.steps")
