"""`plait pipeline` as a command: its words, and that a kill in the middle costs only the step in progress."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing, refused

from plait.cli.pipeline import _ranks_and_start, pipeline, sort_arguments
from plait.errors import ConfigError
from plait.posttrain.phases import from_files, make_steps, run_steps
from plait.posttrain.run import phase_runner

PHASE: dict[str, Any] = {
    "data": None,
    "val_data": None,
    "work_dir": None,
    "model": {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 24},
    "posttrain": {"data": [{"type": "task", "samples": 100, "size": 1}], "val_fraction": 0.1},
    "plan": "off",
    "batch": {"total": 8},
}


def test_files_settings_and_flags_may_stand_in_any_order() -> None:
    line = "a.yaml optim.lr=3e-4 b.toml -n 2 --step 1 3 seed=5 --output-dir=out --data_path x.jsonl y.json --dry-run"
    asked = sort_arguments(line.split())
    assert (asked.files, asked.overrides) == (["a.yaml", "b.toml"], ["optim.lr=3e-4", "seed=5"])
    assert asked.options == {"nproc": "2", "dry_run": ""}
    assert asked.step_flags == ["--step", "1", "3", "--output-dir=out"]
    assert asked.flags == ["--data_path", "x.jsonl", "y.json"]
    assert sort_arguments(["--actor-model", "m", "a.yaml"]).files == ["a.yaml"], "one folder is one word"


@pytest.mark.parametrize(
    ("words", "key", "names"),
    [
        ("a.yaml --nprocs 2", "--nprocs", ["`--nproc`"]),
        ("a.yaml --nproc", "--nproc", ["`--nproc VALUE`"]),
        ("sft", "sft", [".yaml", "`key=value`"]),
        ("a.yaml --deployment-type multi_node", "--deployment-type", ["multi_node", "`--hostfile FILE`"]),
        ("a.yaml --deployment-type single_gpu --nproc 2", "--deployment-type", ["single_gpu", "--nproc 2"]),
        ("a.yaml --hostfile h --nproc 2", "--nproc", ["hostfile"]),
        ("a.yaml --nproc many", "--nproc", ["'many'", "gpu"]),
    ],
)
def test_words_that_mean_nothing_or_disagree_are_refused(words: str, key: str, names: list[str]) -> None:
    with refused(ConfigError, *names, key=key):
        _ranks_and_start(sort_arguments(words.split()))


def test_hosts_and_deployments_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\ntwo slots=3\n")
    assert _ranks_and_start(sort_arguments(["--deployment-type", "multi_node", "--hostfile", str(hosts)]))[:2] == (5, 3)
    assert _ranks_and_start(sort_arguments(["--deployment-type", "single_gpu"]))[:2] == (1, 1)
    assert _ranks_and_start(sort_arguments(["-n2"]))[:2] == (2, 2)


def test_without_words_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["a.yaml", "-h"]):
        pipeline(words)
        assert "--deployment-type" in capsys.readouterr().out


def test_a_pipeline_that_is_killed_goes_on_with_the_same_command(
    make_place: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    place.describe("sft.yaml", **{**PHASE, "train": {"max_steps": 2}})
    place.describe("dpo.yaml", **{**PHASE, "train": {"max_steps": 120}, "checkpoint": {"every": 10, "keep": 2}})
    words = ("pipeline", "sft.yaml", "dpo.yaml")
    (first, _) = make_steps(from_files(["sft.yaml", "dpo.yaml"]), ranks=1, local_ranks=1)
    assert run_steps([first], _here, print) == 0
    process = place.start(*words, start_new_session=True)
    try:
        while not list(tmp_path.glob("runs/pipeline/dpo/checkpoints/step-*/manifest.json")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    said: list[str] = []
    steps = make_steps(from_files(["sft.yaml", "dpo.yaml"]), ranks=1, local_ranks=1)
    assert run_steps(steps, _here, said.append) == 0
    assert not missing(said[0], "sft", "runs/pipeline/sft")
    assert not missing(said[1], "dpo", "runs/pipeline/dpo")
    record = (tmp_path / "runs/pipeline/dpo/events-rank0.jsonl").read_text()
    assert '"resumed": true' in record
    capsys.readouterr()
    pipeline([*words[1:], "--dry-run"])
    *table, talk, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in table[1:]] == [["1", "sft", "complete"], ["2", "dpo", "complete"]]
    assert talk == "plait chat --path runs/pipeline/dpo"


def _here(command: list[str]) -> int:
    with phase_runner(command[0], command[1], command[2:]) as runner:
        runner.train()
    return 0
