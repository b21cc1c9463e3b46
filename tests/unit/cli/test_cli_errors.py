"""What is wrong with a command is said on one screen, before anything is loaded or started."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from tests.refusals import missing, refused

from plait.cli.train import _count
from plait.errors import ConfigError

TWO = ["--nproc", "2"]

# Name of the case: description changes, command line, and what must be said.
WRONG: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "misspelt key": ({"optin": {"lr": 1e-3}}, ["train", "FILE", *TWO], ["optin", "did you mean `optim`", "FILE"]),
    "misspelt override": ({}, ["train", "FILE", "strategy.zerro=3", *TWO], ["strategy.zerro", "`zero`", "override"]),
    "missing file": ({}, ["train", "nowhere.yaml", *TWO], ["nowhere.yaml", "no such file"]),
    "a folder": ({}, ["train", ".", *TWO], ["this is a folder", "broken.yaml"]),
    "a setting with dashes": ({}, ["train", "FILE", "--optim.lr=3e-4"], ["--optim.lr", "`optim.lr=3e-4`"]),
    "an engine's name": ({}, ["train", "FILE", "strategy=deepspeed"], ["an engine", "{engine: deepspeed, zero: 2}"]),
    "missing script": ({}, ["launch", "--nproc_per_node", "2", "train.py"], ["no script 'train.py'"]),
    "missing program": ({}, ["launch", "--nproc_per_node=2", "--no_python", "no-such"], ["no program 'no-such'"]),
    "two models": ({}, ["chat", "one", "--path", "other"], ["name one model"]),
    "broken file": ({}, ["train", "broken.yaml", *TWO], ["broken.yaml:2:", "^"]),
    "wrong dtype": ({"precision": "bf61"}, ["train", "FILE", *TWO], ["precision", "bf61", "bf16"]),
    "uneven batch": ({"batch": {"total": 3}}, ["train", "FILE", *TWO], ["batch", "3 ÷ 2", "`total: 4`"]),
    "recorded on two ranks": ({"strategy": {"graphs": True}}, ["train", "FILE", *TWO], ["strategy.graphs", "are 2"]),
    "recorded in parts": ({"strategy": {"graphs": True}}, ["train", "FILE", "batch.accumulation=2"], ["a step has 2"]),
    "missing data": (
        {"data": {"type": "text", "path": "copus.txt", "vocab_size": 300, "seq_len": 16}},
        ["train", "FILE", *TWO],
        ["data.path", "'copus.txt' does not exist", "did you mean `corpus.txt`", "FILE"],
    ),
    "missing tokens": ({"data": {"type": "tokens", "path": "t.bin", "seq_len": 16}}, ["train", "FILE"], ["data.path"]),
    "no tokens": (
        {"data": {"type": "tokens", "path": "corpus.txt", "seq_len": 16}},
        ["train", "FILE"],
        ["data.path", "'corpus.txt' is not a token file", "'corpus.txt.json'"],
    ),
    "missing images": (
        {"model": {"type": "resnet"}, "data": {"type": "image_folder", "path": "img"}, "val_data": None},
        ["train", "FILE", "train.val_every=null"],
        ["data.path", "img"],
    ),
    "missing model": ({"model": {"type": "hf", "path": "weights"}}, ["train", "FILE"], ["model.path", "weights"]),
    "missing checkpoint": ({}, ["train", "FILE", "checkpoint.resume=old/run", *TWO], ["checkpoint.resume", "old/run"]),
    "missing sections": (
        {"model": None, "data": None},
        ["train", "FILE", *TWO],
        ["model: it is missing", "data: it is missing"],
    ),
    "no length": ({"train": {}}, ["train", "FILE", *TWO], ["max_epochs", "max_steps"]),
    "contradiction": (
        {"strategy": {"zero": 3, "sharding": "NO_SHARD"}},
        ["train", "FILE", *TWO],
        ["zero"],
    ),
    "a metric that nobody measures": (
        {"val_data": {"type": "text", "path": "corpus.txt", "seq_len": 16}},
        ["train", "FILE", "checkpoint.best.metric=accuracy", "hooks=[{type: early_stop, metric: f1}]"],
        ["checkpoint.best.metric (from override): 'accuracy' is not measured", "hooks.0.metric", "`loss`"],
    ),
    "no processes": ({}, ["train", "FILE", "--nproc", "0"], ["on the command line", "--nproc", "'0'"]),
    "fewer than none": ({}, ["train", "FILE", "--nproc", "-1"], ["--nproc", "'-1'"]),
    "no number": ({}, ["train", "FILE", "--nproc", "two"], ["--nproc", "'two'"]),
    "more digits than Python reads": ({}, ["train", "FILE", "--nproc", "9" * 5000], ["--nproc", "'999"]),
    "an entry of that number": ({}, ["train", "FILE", f"hooks.{'9' * 5000}.x=1"], ["no entry '999"]),
    "more ranks than hosts have": ({}, ["launch", "--nproc_per_node", "999999999", "broken.yaml"], ["999999999 ranks"]),
    "an odd digit": ({}, ["train", "FILE", "--nproc", "²"], ["--nproc", "'²'"]),
    "no such tuner": ({}, ["tune", "FILE", "--tuner", "fast"], ["on the command line", "--tuner", "'fast'"]),
    "no trials": ({}, ["tune", "FILE", "--trial-seconds", "0"], ["on the command line", "--trial-seconds"]),
    "a section as an option": ({}, ["train", "FILE", "--strategy", "zero3"], ["--strategy", "`strategy=…`"]),
    "unknown option": ({}, ["train", "FILE", "--nprocs", "2"], ["--nprocs"]),
    "unknown command": ({}, ["trian", "FILE"], ["trian"]),
}
RIGHT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "help": ({}, ["--help"], ["train", "generate", "report", "doctor"]),
    "help on train": ({}, ["train", "--help"], ["--nproc", "--dry-run", "strategy.zero=3"]),
    "version": ({}, ["--version"], ["0."]),
    "completion": ({}, ["--show-completion", "bash"], ["_PLAIT_COMPLETE", "complete"]),
    "dry run": ({}, ["train", "FILE", "strategy=zero3", "optim.lr=3e-4", "--dry-run", *TWO], ["strategy.zero"]),
}

SCRIPT = """
import contextlib, io, json, subprocess, sys
def refuse(*_, **__): raise AssertionError("a process was started")
subprocess.Popen = refuse
from plait.cli.main import main
results = {}
for name, argv in json.loads(sys.argv[1]).items():
    sys.argv = ["plait", *argv]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as ended:
            code = ended.code
    results[name] = [code, out.getvalue(), err.getvalue(), "torch" in sys.modules]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def where(make_place: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_place(tmp_path_factory.mktemp("errors"))


@pytest.fixture(scope="module")
def answers(where: Any) -> dict[str, Any]:
    """All commands, given one after another in one process that must not start another."""
    place = where
    (place.folder / "broken.yaml").write_text("model: {type: gpt\ndata: [1, 2\n")
    commands = {}
    for name, (changes, argv, _) in {**WRONG, **RIGHT}.items():
        file = place.describe(f"{re.sub(r'[^a-z]', '_', name)}.yaml", **changes)
        commands[name] = [file if word == "FILE" else word for word in argv]
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    # Completion asks which shell this was started from; the answer would depend on how the tests were started.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    ended = subprocess.run(command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return {name: (*answer, commands[name]) for name, answer in json.loads(ended.stdout).items()}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_is_answered_on_one_screen(answers: dict[str, Any], case: str) -> None:
    code, out, err, loaded_torch, command = answers[case]
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 25
    assert max(map(len, err.splitlines())) <= 240
    for words in WRONG[case][2]:
        assert words.replace("FILE", command[1]).lower() in err.lower()
    assert not loaded_torch


@pytest.mark.parametrize("case", RIGHT)
def test_a_question_is_answered_without_loading_torch(answers: dict[str, Any], case: str) -> None:
    code, out, err, loaded_torch, _ = answers[case]
    assert (code, err) == (0, "")
    for words in RIGHT[case][2]:
        assert words in out
    assert not loaded_torch


def test_a_dry_run_shows_every_setting_and_where_it_came_from(answers: dict[str, Any]) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in answers["dry run"][1].splitlines() if line.strip()}
    assert rows["strategy.zero"] == ["3", "override"]
    assert rows["optim.lr"] == ["0.0003", "override"]
    assert rows["model.dim"] == ["16", "dry_run.yaml"]
    assert rows["optim.weight_decay"] == ["0.01", "default"]
    assert rows["data.path"] == ["corpus.txt", "dry_run.yaml"]
    assert rows["optim.betas"] == ["[0.9,", "0.999]", "default"]
    assert rows["schedule"] == ["null", "default"]
    assert rows["precision.scaler.consecutive_hysteresis"] == ["false", "default"]  # whole, in a pipe too


def test_nothing_is_written_by_any_of_them(answers: dict[str, Any], where: Any) -> None:
    assert not (where.folder / "run").exists()
    assert not (where.folder / "cache").exists()


def test_one_process_a_gpu_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert _count("gpu") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with refused(ConfigError, "'gpu'", "GPU", key="--nproc"):
        _count("gpu")


def test_a_place_that_may_not_be_written_to_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module("plait.cli.main")

    def refuse() -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/mnt/read-only/run")

    monkeypatch.setattr(main, "app", refuse)
    for name in ("open_closed_streams", "restart_in_utf8_mode", "replace_unencodable"):
        monkeypatch.setattr(main, name, lambda: None)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert not missing(capsys.readouterr().err, "/mnt/read-only/run", "Read-only file system")
