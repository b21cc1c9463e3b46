"""Promise 1 for PPO and GRPO: the same answers, rewards, losses and weights under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.engine import StepResult
from plait.posttrain.rl.trainer import OnlineRunner
from plait.posttrain.run import phase_runner
from plait.trainer import Hook
from tests.multi.ranks import RankPool
from tests.refusals import missing

LLAMA = {"type": "llama", "vocab_size": 12, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 16}
TASK = {"type": "task", "samples": 60, "size": 1}
LAYOUTS: dict[str, Any] = {"ddp": {}, "zero3": {"zero": 3}, "tp2": {"layout": {"tp": 2}}}
MEASURED = ("reward", "reward_std", "kl", "length", "entropy", "policy_loss", "clip_fraction", "accuracy", "beta")


def describe(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "work_dir": str(folder),
        "model": LLAMA,
        "posttrain": {"data": [TASK], "val_fraction": 0.1, **changes.pop("posttrain", {})},
        "rollout": {"prompts": 8, "max_new_tokens": 4, "temperature": 0.9},
        "optim": {"lr": 1e-2, "eps": 1e-3},
        "batch": {"total": 8, "micro": 2},
        "train": {"max_steps": 6, "val_every": 3},
        "checkpoint": {"last": False},
        "log": {"console": "none", "every": 1},
        "plan": "off",
        "seed": 5,
        **changes,
    }


class Noting(Hook):
    """Writes down what each step did, once everybody else has."""

    priority = 90

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def after_step(self, runner: Any, result: StepResult) -> None:
        self.steps.append({**runner.figures, "loss": result.loss, "norm": result.grad_norm})


Trace = tuple[list[dict[str, float]], dict[str, float], dict[str, torch.Tensor]]


def train(rank: int, size: int, phase: str, description: dict[str, Any]) -> Trace:
    """What every step measured, the last validation, and all weights, whole."""
    noting = Noting()
    with phase_runner(phase, description, hooks=[noting]) as runner:
        assert isinstance(runner, OnlineRunner)
        runner.train()
        tensors = dict(runner.engine.state_tensors())
        if runner.roles.critic is not None:
            tensors |= {f"critic.{name}": value for name, value in runner.roles.critic.state_tensors().items()}
        whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}
        return noting.steps, runner.validate(), whole


def assert_same(found: Trace, expected: Trace) -> None:
    for step, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-4), step
    assert found[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-4)
    assert found[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        assert torch.allclose(found[2][name].float(), tensor.float(), atol=2e-3, rtol=1e-3), name


def test_ppo_with_all_four_models_is_the_same_run_under_any_layout(two_ranks: RankPool, tmp_path: Path) -> None:
    judge = {"max_steps": 3}
    with phase_runner("reward", describe(tmp_path / "judge", train=judge, checkpoint={}, rollout=None)) as runner:
        runner.train()
    ppo = {
        "reward_model": str(tmp_path / "judge"),
        "epochs": 2,
        "critic_lr": 2e-3,
        "kl": "adaptive",
        "kl_horizon": 100.0,
        "ptx_data": [TASK],
        "ptx_weight": 0.5,
    }
    expected = train(0, 1, "ppo", describe(tmp_path / "alone", ppo=ppo))
    assert all(key in expected[0][-1] for key in (*MEASURED, "value_loss", "skipped_answers"))
    for name, strategy in LAYOUTS.items():
        for found in two_ranks.run(train, "ppo", describe(tmp_path / name, ppo=ppo, strategy=strategy)):
            assert_same(found, expected)


def test_grpo_with_adapters_is_the_same_run_under_any_layout(two_ranks: RankPool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "grpo": {"group": 4, "epochs": 2, "beta": 0.1, "weighting": "token"},
        "rollout": {"prompts": 4, "max_new_tokens": 4, "mode": "gathered"},
        "lora": {"rank": 4, "lr": 2e-2},
    }
    expected = train(0, 1, "grpo", describe(tmp_path / "alone", **changes))
    for name, strategy in LAYOUTS.items():
        for found in two_ranks.run(train, "grpo", describe(tmp_path / name, **changes, strategy=strategy)):
            assert_same(found, expected)


def test_ppo_that_stopped_within_a_rollout_goes_on_under_another_layout(two_ranks: RankPool, tmp_path: Path) -> None:
    ppo = {"reward": "task", "epochs": 4}
    whole = train(0, 1, "ppo", describe(tmp_path / "whole", ppo=ppo))
    stopped = {"ppo": ppo, "checkpoint": {}, "train": {"max_steps": 6, "stop_after": 2}}
    train(0, 1, "ppo", describe(tmp_path / "part", **stopped))
    again = describe(tmp_path / "part", ppo=ppo, checkpoint={"resume": "auto"}, strategy={"zero": 3})
    for steps, _, tensors in two_ranks.run(train, "ppo", again):
        assert len(steps) == 4
        for mine, theirs in zip(steps, whole[0][2:], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-4)
        assert_same(([], {}, tensors), ([], {}, whole[2]))


def fail(rank: int, size: int, description: dict[str, Any]) -> str:
    try:
        train(rank, size, "grpo", description)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def only_on_the_second(prompt: str, answer: str, right: str) -> float:
    """Fails for some prompts, which only one of the ranks may have."""
    if prompt > "e":
        raise KeyError("no such thing")
    return 1.0


def test_a_reward_function_that_raises_ends_every_rank_with_the_same_error(two_ranks: RankPool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"grpo": {"group": 2, "reward": "tests.multi.test_online_parity:only_on_the_second"}}
    changes["rollout"] = {"prompts": 8, "max_new_tokens": 2, "bad_reward": "error"}
    found = two_ranks.run(fail, describe(tmp_path / "run", **changes))
    assert found[0] == found[1]
    assert found[0].startswith("TrainingError: ")
    assert not missing(found[0], f"{__name__}:only_on_the_second", "no such thing", "rollout.bad_reward")
