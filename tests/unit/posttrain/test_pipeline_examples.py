"""The pipelines among the examples are ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.config import check, parse
from plait.frontends.deepspeed.chat import read_steps, with_train_flags
from plait.posttrain.data.tasks import gsm8k_reward
from plait.posttrain.phases import from_files, make_steps

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("files", "phases"),
    [(["pipeline.yaml"], ["sft", "reward", "ppo"]), (["sft.yaml", "grpo.yaml"], ["sft", "grpo"])],
    ids=["a file", "a file each"],
)
def test_the_steps_of_rlhf_fit_each_other(files: list[str], phases: list[str], tmp_path: Path) -> None:
    wanted = from_files([str(EXAMPLES / "rlhf" / file) for file in files])
    words = read_steps(["--output-dir", str(tmp_path)])
    steps = make_steps(with_train_flags(wanted, words, ["output_dir"]), ranks=2, local_ranks=2)
    assert [step.phase for step in steps] == phases
    assert [step.folder for step in steps] == [tmp_path / phase for phase in phases]
    assert {each.phase for each in steps[-1].after} == set(phases[:-1])


def test_the_steps_of_gsm8k_are_runs_of_one_model() -> None:
    wanted = from_files([str(EXAMPLES / "gsm8k" / "pipeline.yaml")])
    assert [step.phase for step in wanted.steps] == ["train", "sft", "grpo"]
    models = []
    for step in wanted.steps:
        phase = [] if step.phase == "train" else [f"phase={step.phase}"]
        config = parse(step.source, [*step.settings, *phase]).config
        check(config, has_val=True, require_length=True)
        models.append(config.model)
    assert models[0] is not None
    assert models[0] == models[1] == models[2]


def test_the_problems_of_gsm8k_are_made_here_and_are_right(tmp_path: Path) -> None:
    script = EXAMPLES / "gsm8k" / "make_problems.py"
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        command = [sys.executable, str(script), "--folder", str(folder), "--train", "60", "--test", "20"]
        subprocess.run(command, check=True, capture_output=True)
        written.append({path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()})
    assert written[0] == written[1]
    assert written[0].keys() == {"train.jsonl", "test.jsonl", "solutions.jsonl"}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in written[0].items()}
    questions = [row["question"] for each in rows.values() for row in each]
    assert len(questions) == len(set(questions)) == 100
    for row in [*rows["train.jsonl"], *rows["test.jsonl"]]:
        found = re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", row["answer"])
        for left, sign, right, result in found:
            values = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert values.get(sign, int(left) / int(right)) == int(result)
        assert row["answer"].endswith(f"#### {found[-1][3]}")
    for row in rows["solutions.jsonl"]:
        right, wrong = row["careful"], row["hasty"]
        assert (right["is_correct"], wrong["is_correct"]) == (True, False)
        assert gsm8k_reward("", wrong["solution"], right["solution"]) == 0.0


def test_no_example_reads_from_outside_of_the_project() -> None:
    for path in EXAMPLES.rglob("*"):
        if path.suffix in (".yaml", ".json", ".toml", ".py"):
            assert "../" not in path.read_text(encoding="utf-8"), path
