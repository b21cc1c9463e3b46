"""The commands on a real, tiny run."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing

from plait.cli.main import main

Trained = tuple[Any, subprocess.CompletedProcess[str]]

LINE = re.compile(r"\d\d/\d\d \d\d:\d\d:\d\d - plait - (INFO|WARNING) - \S")


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["plait", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_training_in_a_pipe_prints_clean_lines_and_nothing_else(trained: Trained) -> None:
    place, ended = trained
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not set("\x1b\r\b") & set(ended.stdout)
    table, _, log = ended.stdout.partition("\n\n")
    assert "plait · Gpt" in table
    assert "6 steps" in table
    assert all(LINE.match(line) for line in log.splitlines())
    assert [line.split("Iter(train) ")[1][:5] for line in log.splitlines() if "(train)" in line] == [
        "[2/6]",
        "[4/6]",
        "[6/6]",
    ]
    assert log.count("Iter(val)") == 2
    assert not missing(log.splitlines()[-1], "finished", "6 steps")
    assert (place.folder / "note.txt").read_text() == "6 steps"  # a hook from the current folder


def test_generate_continues_a_text_and_a_seed_fixes_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = trained[0].folder, []
    for seed, run in (("1", "run"), ("1", "run/checkpoints/latest"), ("2", "run")):
        options = ["--prompt", "line 1", "--tokens", "12", "--temperature", "2", "--seed", seed]
        assert call(monkeypatch, folder, "generate", run, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("line 1") for text in texts)


def test_generate_gives_the_same_text_with_weights_beyond_the_device(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = trained[0].folder, []
    for extra in ([], ["--offload", "cpu"], ["--offload", "nvme", "--offload-path", "files"]):
        assert call(monkeypatch, folder, "generate", "run", "--prompt", "line 1", "--tokens", "8", *extra) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert call(monkeypatch, folder, "generate", "run", "--offload", "disk") == 2
    assert not missing(capsys.readouterr().err, "--offload", "'disk'", "cpu", "nvme")


def test_generate_says_what_it_cannot_use(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, trained[0].folder, "generate", "cache") == 2
    assert not missing(capsys.readouterr().err, "checkpoint", "cache")
    assert call(monkeypatch, trained[0].folder, "generate", "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err


def test_report_draws_one_page(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, trained[0].folder, "report", "run", "--out", "page.html") == 0
    assert "page.html" in capsys.readouterr().out
    assert "<svg" in (trained[0].folder / "page.html").read_text()
    assert call(monkeypatch, trained[0].folder, "report", "cache") == 2
    assert not missing(capsys.readouterr().err, "work_dir", "cache")
    assert call(monkeypatch, trained[0].folder, "report", "run", "--out", "page.html/page.html") == 2
    assert "page.html/page.html" in capsys.readouterr().err
    assert call(monkeypatch, trained[0].folder, "report", "run", "--sample", "nowhere.txt") == 2
    assert not missing(capsys.readouterr().err, "--sample", "'nowhere.txt'", "No such file")


def test_a_file_that_cannot_be_written_is_said_with_the_option_that_named_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, trained[0].folder, "generate", "run", "--tokens", "1", "--html", "run/config.yaml/a") == 2
    assert not missing(capsys.readouterr().err, "--html", "'run/config.yaml/a'", "Not a directory")


def test_doctor_shows_what_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, Path.cwd(), "doctor") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("plait", "torch", "gloo", "cores", "gpu"))


def test_a_terminal_shows_a_bar(place: Any) -> None:
    main_end, their_end = pty.openpty()
    ends = {"stdin": their_end, "stdout": their_end, "stderr": their_end}
    process = place.start("train", "run.yaml", "train.max_steps=20", "plan=off", **ends)
    os.close(their_end)
    shown = b""
    while True:
        ready, _, _ = select.select([main_end], [], [], 120)
        assert ready, "nothing was shown for two minutes"
        try:
            shown += os.read(main_end, 65536)
        except OSError:  # the other end is closed
            break
    os.close(main_end)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "━" in text or "╸" in text
    assert re.search(r"\d+/20", text)
    assert "\x1b[" in text
    assert not missing(text, "finished", "20 steps")


@pytest.mark.parametrize("module", ["plait", "plait.cli.main"])
def test_python_runs_the_package_as_the_command(tmp_path: Path, module: str) -> None:
    words = [sys.executable, "-m", module, "train", "absent.yaml"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("plait: ")
    assert "absent.yaml" in ended.stderr
    assert "Traceback" not in ended.stderr
