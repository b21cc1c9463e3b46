"""PPO and GRPO as runs: what they tell, how they are interrupted, and what users get wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from typer.testing import CliRunner

from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.convert.source import averaged
from plait.cli.main import app
from plait.config import parse
from plait.errors import ConfigError, DataError, RolloutMismatchError
from plait.generate.cached import LlamaDecodeStep
from plait.posttrain.rl.trainer import OnlineRunner
from plait.posttrain.run import phase_runner

MODEL = {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16}
FIGURES = {"reward", "reward_std", "kl", "length", "entropy", "clip_fraction", "policy_loss", "accuracy", "beta"}


def describe(work_dir: Path, steps: int = 4, **changes: Any) -> dict[str, Any]:
    posttrain = {"data": [{"type": "task", "samples": 60, "size": 1}], "val_fraction": 0.1}
    return {
        "work_dir": str(work_dir),
        "model": MODEL,
        "posttrain": {**posttrain, **changes.pop("posttrain", {})},
        "rollout": {"prompts": 8, "max_new_tokens": 4, **changes.pop("rollout", {})},
        "optim": {"lr": 1e-2},
        "batch": {"total": 8},
        "train": {"max_steps": steps},
        "log": {"console": "none", "every": 1},
        "plan": "off",
        **changes,
    }


def run(phase: str, description: dict[str, Any]) -> dict[str, torch.Tensor]:
    with phase_runner(phase, description) as runner:
        runner.train()
        assert isinstance(runner, OnlineRunner)
        tensors = dict(runner.engine.state_tensors())
        if runner.roles.critic is not None:
            tensors |= {f"critic.{name}": value for name, value in runner.roles.critic.state_tensors().items()}
        return {name: tensor.clone() for name, tensor in tensors.items()}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events-rank0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


PPO = {"reward": "task", "epochs": 2, "kl": "adaptive", "kl_horizon": 50.0}


def test_every_step_tells_its_figures_and_rollouts_leave_samples(tmp_path: Path) -> None:
    schedule = {"type": "CosineAnnealingLR", "min_factor": 0.5}  # of those who learn; a reference has none
    changes = {"ppo": PPO, "hooks": [{"type": "ema", "decay": 0.5}], "checkpoint": {}, "schedule": schedule}
    after = run("ppo", describe(tmp_path, **changes))
    told = [event["data"] for event in events(tmp_path, "train")]
    assert len(told) == 4
    assert all(step.keys() >= {*FIGURES, "value_loss", "skipped_answers"} for step in told)
    assert told[0]["kl"] == told[1]["kl"] == pytest.approx(0.0, abs=1e-6)  # of the first rollout
    assert told[2]["kl"] != 0.0
    assert told[2]["beta"] != told[0]["beta"]  # below its target, the weight sinks
    found = [event["data"]["metrics"] for event in events(tmp_path, "validate")]
    assert [set(metrics) for metrics in found] == [{"reward", "length", "skipped_answers", "accuracy"}] * 2
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0] * 4 + [2] * 4
    assert set(samples[0]) == {"step", "prompt", "answer", "reward"}
    with open_source(tmp_path) as source:  # the averaged policy is a result too
        best = averaged(source)
        mean = {name: best.read(name) for name in best.entries if name.startswith("model.")}
    assert any(not torch.equal(mean[name], after[name]) for name in mean)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rollouts_of_a_llama_go_the_short_way_for_single_tokens(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy's class has more to it than a Llama's, and the kernels know Llamas only; see `make_generator_model`."""
    taken: list[torch.dtype] = []

    class Counted(LlamaDecodeStep):
        def __init__(self, model: torch.nn.Module, slots: int) -> None:
            super().__init__(model, slots)
            taken.append(next(model.parameters()).dtype)

    monkeypatch.setattr("plait.generate.cached.has_kernels", lambda _: True)  # their twins stand in for them
    monkeypatch.setattr("plait.generate.cached.LlamaDecodeStep", Counted)
    model = {**MODEL, "type": "llama", "dim": 32}
    changes = {"model": model, "grpo": {"group": 2}, "rollout": {"verify_every": 1}, "precision": precision}
    run("grpo", describe(tmp_path, **changes))
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    assert taken == [compute] * 4  # two rollouts, and answers to held-out prompts before and after


@pytest.mark.parametrize("phase", ["ppo", "grpo"])
def test_a_run_that_stopped_within_a_rollout_goes_on_as_if_it_had_not(phase: str, tmp_path: Path) -> None:
    method = {"ppo": PPO} if phase == "ppo" else {"grpo": {"group": 2, "epochs": 2}}
    whole = run(phase, describe(tmp_path / "whole", 6, **method))
    part = describe(tmp_path / "part", 6, **method)
    run(phase, {**part, "train": {"max_steps": 6, "stop_after": 3}})
    gone_on = run(phase, {**part, "checkpoint": {"resume": "auto"}})
    assert whole.keys() == gone_on.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, gone_on[name]), name
    told = [[event["data"]["reward"] for event in events(tmp_path / at, "train")] for at in ("whole", "part")]
    assert told[0] == told[1]


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    description = describe(tmp_path / "run", 1000, grpo={"group": 2, "epochs": 3}, checkpoint={"every": 1})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(description))
    process = subprocess.Popen([sys.executable, "-m", "plait", "grpo", str(file)], stderr=subprocess.DEVNULL)
    folder = tmp_path / "run" / "checkpoints"
    while not len(list(folder.glob("step-*/manifest.json"))) >= 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    description["checkpoint"] = {"resume": "auto"}
    description["train"] = {"max_steps": 1000, "stop_after": 30}
    with phase_runner("grpo", description) as runner:
        assert isinstance(runner, OnlineRunner)
        runner.setup()
        before = runner.step
        assert before >= 2
        assert runner.worker.experience.number == (before - 1) // 6
        runner.train()
        assert runner.step == 30


def test_prompts_need_no_answers_and_those_without_room_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{letter}a="} for letter in "bcdefgh"] + [{"prompt": "abcdefghij" * 2}, {"prompt": " "}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tmp_path / "tokenizer.json"
    with phase_runner("grpo", describe(tmp_path / "task", grpo={"group": 2})) as runner:
        runner.phase_data.tokenizer.save(tokenizer)
    data = {"data": [{"type": "file", "path": str(tmp_path / "rows.jsonl")}], "tokenizer": str(tokenizer)}
    changes: dict[str, Any] = {"grpo": {"group": 2, "reward": "task"}, "posttrain": data}
    with phase_runner("grpo", describe(tmp_path / "run", 1, **changes)) as runner:
        assert len(runner.phase_data.train) == 6
        left_out = dict(runner.phase_data.report.left_out)
        assert left_out.pop("empty") == 1
        assert [("max_len" in reason, count) for reason, count in left_out.items()] == [(True, 1)]
        with refused(DataError, "targets", "0", "-100"):
            runner.train()  # `task` knows nothing of these prompts: every answer is skipped, and counted
    told = events(tmp_path / "run", "train")[-1]["data"]
    assert (told["skipped_answers"], told["loss"]) == (16.0, 0.0)
    changes["posttrain"] = {**data, "too_long": "error"}
    with refused(DataError, "line 8", "max_len", "20", "posttrain.too_long: skip"):
        phase_runner("grpo", describe(tmp_path / "strict", 1, **changes))
    rows = [{"question": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with refused(DataError, "line 1", "'prompt'", "'question'", "posttrain.incomplete: skip"):
        phase_runner("grpo", describe(tmp_path / "wrong", 1, **{**changes, "posttrain": data}))


def always_one(prompt: str, answer: str, expected: str | None) -> float:
    """A reward function that knows no difference."""
    return 1.0


def test_a_reward_that_is_the_same_for_all_answers_is_told_of_once(tmp_path: Path) -> None:
    run("grpo", describe(tmp_path, 3, grpo={"group": 2, "reward": f"{__name__}:always_one"}))
    told = [event["data"]["text"] for event in events(tmp_path, "message")]
    assert [found for text in told for found in re.findall(r"\brollout \d+", text)] == ["rollout 0"]


def test_a_writer_that_is_not_the_policy_stops_the_run_or_is_replaced(tmp_path: Path) -> None:
    # No rounding is as small as this tolerance, so what writes with a cache never passes.
    strict = {"tolerance": 1e-30, "mode": "gathered"}
    grpo = {"grpo": {"group": 2}}
    with refused(RolloutMismatchError, "tokens", "1e-30", "mode: trainer", "on_mismatch: fallback"):
        run("grpo", describe(tmp_path / "stop", 1, **grpo, rollout=strict))
    run("grpo", describe(tmp_path / "go", 2, **grpo, rollout={**strict, "on_mismatch": "fallback"}))
    texts = [event["data"]["text"] for event in events(tmp_path / "go", "message")]
    assert sum(not missing(text, "WARNING", "1e-30", "gathered") for text in texts) == 1


def test_a_judge_with_other_tokens_or_less_room_is_refused(tmp_path: Path) -> None:
    small = describe(tmp_path / "judge", 1, model={**MODEL, "seq_len": 8})
    with phase_runner("reward", {key: value for key, value in small.items() if key != "rollout"}) as runner:
        runner.train()
    wrong = describe(tmp_path / "ppo", 1, ppo={"reward_model": str(tmp_path / "judge")})
    with refused(ConfigError, "8 tokens", "16", "posttrain.max_len: 8", key="ppo.reward_model"):
        run("ppo", wrong)
    fitting = {"reward_model": str(tmp_path / "judge"), "critic_lora": {"rank": 2, "lr": 1e-3}}
    after = run("ppo", describe(tmp_path / "fits", 1, ppo=fitting, posttrain={"max_len": 8}))
    assert any(name.startswith("critic.model.") and ".lora_A." in name for name in after)
    other = {"data": [{"type": "task", "name": "arithmetic", "samples": 60, "size": 1}], "max_len": 8}
    with refused(DataError, str(tmp_path / "judge"), "tokenizer", "posttrain.tokenizer"):
        run("ppo", describe(tmp_path / "other", 1, ppo=fitting, posttrain=other, model={**MODEL, "vocab_size": 14}))


def test_adapters_may_learn_at_a_rate_of_their_own(tmp_path: Path) -> None:
    lora = {"rank": 2, "only": False, "lr": 3e-4}
    with phase_runner("grpo", describe(tmp_path, grpo={"group": 2}, lora=lora)) as runner:
        assert isinstance(runner, OnlineRunner)
        assert runner.online.reference == "start"  # with everything in training, the base moves too
        runner.setup()
        optimizer: Any = runner.engine.updater.optimizer  # type: ignore[attr-defined]
        rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {rate for name, rate in rates.items() if ".lora_" in name} == {3e-4}
    assert {rate for name, rate in rates.items() if ".lora_" not in name} == {1e-2}


def test_the_commands_check_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(describe(tmp_path / "run", ppo={})))
    ended = CliRunner().invoke(app, ["ppo", str(file)])
    assert isinstance(ended.exception, ConfigError)
    assert not missing(str(ended.exception), "ppo.reward_model", "`ppo.reward`")
    absent = ["posttrain.start=runs/none", f"ppo.reward_model={tmp_path / 'runn.yaml'}"]
    ended = CliRunner().invoke(app, ["ppo", str(file), *absent])
    assert isinstance(ended.exception, ConfigError)
    assert [problem.path for problem in ended.exception.problems] == ["posttrain.start", "ppo.reward_model"]
    assert not missing(str(ended.exception), "'runs/none'", f"`{file}`")
    shown = CliRunner().invoke(app, ["grpo", str(file), "--dry-run", "grpo.group=4"])
    assert shown.exit_code == 0
    assert "grpo.group" in shown.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("phase", ["sft", "reward", "ppo", "grpo"])
def test_the_examples_of_the_three_steps_are_runs(phase: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "rlhf" / f"{phase}.yaml"
    shown = CliRunner().invoke(app, [phase, str(path), "--dry-run"])
    assert shown.exit_code == 0, shown.exception
    assert parse(path, [f"phase={phase}"]).config.work_dir == f"runs/rlhf/{phase}"


def alike(prompt: str, text: str, right: str) -> float:
    return 0.1


def test_rewards_that_are_all_the_same_are_said_to_teach_nothing(tmp_path: Path) -> None:
    changes = {"grpo": {"reward": f"{__name__}:alike", "group": 4, "reference": "none"}}
    run("grpo", describe(tmp_path, **changes, rollout={"prompts": 2}))
    said = [event["data"]["text"] for event in events(tmp_path, "message")]
    idle = [found for text in said for found in re.findall(r"\brollout \d+", text)]
    assert idle == ["rollout 0"]  # the first of several in a row
    assert {event["data"]["zero_std_groups"] for event in events(tmp_path, "train")} == {1.0}
    (account,) = [text for text in said if text.startswith("grpo: 60 rows")]
    assert not missing(account, "60", "prompts")
    assert any("plain" in text and "template" in text for text in said)
