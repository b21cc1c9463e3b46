"""The pipelines among the examples are ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.config import check, parse
from plait.posttrain.pipeline.check import make_steps
from plait.posttrain.pipeline.describe import from_files, with_words
from plait.posttrain.steps import read_steps

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
    steps = make_steps(with_words(wanted, words, ["output_dir"]), ranks=2, local_ranks=2)
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
