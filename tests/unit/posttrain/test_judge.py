"""Rewards of answers from the command line: by a reward model, by a function, on questions that a run kept back."""

from __future__ import annotations

import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.cli.main import main
from plait.errors import ConfigError, DataError, ModelError
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.reward_judge import Question, held_out, open_scorer, run_behind
from plait.posttrain.run import phase_runner

MODEL = {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16}


def describe(work_dir: Path, steps: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "work_dir": str(work_dir),
        "device": "cpu",
        "model": MODEL,
        "posttrain": {"data": [{"type": "task", "samples": 100, "size": 1}], "val_fraction": 0.2},
        "plan": "off",
        "optim": {"lr": 1e-2},
        "batch": {"total": 8},
        "train": {"max_steps": steps},
        "log": {"console": "none"},
        **changes,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that writes, and one that judges, with the margin that its own validation measured."""
    root = tmp_path_factory.mktemp("judging")
    found = {}
    for phase, steps in (("sft", 1), ("reward", 30)):
        with phase_runner(phase, describe(root / phase, steps)) as runner:
            runner.train()
            measured = runner.validate()
        found[phase] = str(root / phase)
    return {**found, "margin": str(measured["margin"])}


def questions(path: str) -> list[Question]:
    return held_out(path, 20)


def test_a_run_tells_the_questions_that_it_kept_back_with_their_answers(runs: dict[str, str]) -> None:
    found = questions(runs["sft"])
    assert len(found) == 20
    for question in found:
        assert question.right == "".join(sorted(question.text.removesuffix("=")))
    assert len(held_out(runs["sft"], 3)) == 3


def test_a_reward_model_judges_as_it_did_in_training(runs: dict[str, str]) -> None:
    from plait.posttrain.data.prepare import prepare_data

    config = run_behind(runs["reward"])
    assert config is not None
    pairs = prepare_data(config).examples[1]
    asked = [Question(pair.prompt) for pair in pairs]
    judge = open_scorer(runs["reward"])
    right = judge.rewards(asked, [pair.messages[-1].content for pair in pairs])
    wrong = judge.rewards(asked, [pair.rejected or "" for pair in pairs])
    margin = sum(good - bad for good, bad in zip(right, wrong, strict=True)) / len(pairs)
    assert margin == pytest.approx(float(runs["margin"]), rel=1e-4)


def test_an_answer_that_the_judge_cannot_see_whole_is_not_judged(runs: dict[str, str]) -> None:
    asked = [Question((ChatMessage("user", "ba="),))] * 2
    short, long = open_scorer(runs["reward"]).rewards(asked, ["ab", "ab" * 20])
    assert math.isfinite(short)
    assert math.isnan(long)


def test_functions_judge_too(runs: dict[str, str]) -> None:
    run = run_behind(runs["sft"])
    asked = questions(runs["sft"])
    assert open_scorer("task", run).rewards(asked, [question.right for question in asked]) == [1.0] * 20
    number = random.randrange(1000)
    maths = [Question((ChatMessage("user", "how many?"),), f"so\n#### {number}")] * 3
    assert open_scorer("gsm8k").rewards(maths, [f"it is {number}", f"#### {number + 1}", "none"]) == [1.0, 0.0, 0.0]
    assert open_scorer("operator:setitem").__class__.__name__ == "FunctionConversationScorer"


def test_what_cannot_judge_is_refused(runs: dict[str, str], tmp_path: Path) -> None:
    with refused(ModelError, runs["sft"], "`plait sft`", "`plait reward`"):
        open_scorer(runs["sft"])
    for who in ("nowhere", "no_module:f", "task"):
        with refused(ConfigError, who.removesuffix(":f"), key="--reward"):
            open_scorer(who, None if who != "task" else _of_file())
    with refused(DataError, str(tmp_path / "run"), "phase", "--prompts"):
        held_out(_pretrained(tmp_path), 3)


def _of_file() -> Any:
    from plait.config import parse

    return parse({"posttrain": {"data": [{"type": "file", "path": "rows.jsonl"}]}, "phase": "sft"}).config


def _pretrained(folder: Path) -> str:
    from plait.trainer import Runner

    (folder / "text.txt").write_text("a few words, again and again. " * 50)
    data = {"type": "text", "path": str(folder / "text.txt"), "vocab_size": 260, "seq_len": 8, "cache": str(folder)}
    described = describe(folder / "run", data=data, model={**MODEL, "vocab_size": 260})
    del described["posttrain"]
    with Runner.from_config(described) as runner:
        runner.train()
    return str(folder / "run")


def test_generate_asks_what_was_held_out_and_shows_rewards_beside_the_answers(
    runs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["generate", runs["sft"], "--against", runs["sft"], "--held-out", "4", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["plait", *words, "-t", "6", "--reward", runs["reward"], "--html", str(page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told = re.findall(r"reward (\S+) .*\b4\b", capsys.readouterr().out)
    assert len(told) == 2
    assert told[0] == told[1]
    text = page.read_text()
    assert text.count("<small>reward ") == 8
    assert f"<td>{told[0]}</td>" in text
