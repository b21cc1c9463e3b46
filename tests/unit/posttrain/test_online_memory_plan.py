"""What an online run expects of memory before it starts: all of its models, and the writing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import Layout, parse
from plait.errors import ConfigError
from plait.models import build_model
from plait.plan.hardware import find_hardware
from plait.posttrain.rl.memory_plan import count_other_models
from plait.posttrain.run import phase_runner

MODEL = {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 2, "heads": 2, "seq_len": 16}


def describe(**changes: Any) -> dict[str, Any]:
    return {
        "phase": "ppo",
        "model": MODEL,
        "posttrain": {"data": [{"type": "task", "samples": 60, "size": 1}], "val_fraction": 0.0},
        "rollout": {"prompts": 8, "max_new_tokens": 4, **changes.pop("rollout", {})},
        "ppo": {"reward": "task"},
        "batch": {"total": 8},
        "train": {"max_steps": 1},
        "checkpoint": {"last": False},
        "log": {"console": "none"},
        **changes,
    }


def test_every_model_beside_the_policy_is_counted_and_so_are_keys_and_values() -> None:
    config = parse(describe()).config
    assert config.model is not None
    numbers = sum(param.numel() for param in build_model(config.model).parameters())
    found = count_other_models(config, Layout())
    assert found.reference == 4 * numbers
    # The words of a gpt are its head too, and stay; AdamW keeps two more numbers for each.
    assert found.critic == 12 * (numbers + 16)
    assert found.reward_model == 0.0
    assert found.writing == 2 * 2 * 16 * 8 * 16 * 4  # keys and values of two layers, eight rows of sixteen tokens
    sharded = count_other_models(parse(describe(strategy="zero3")).config, Layout(dp_shard=2))
    assert sharded.reference == found.reference / 2
    assert sharded.critic == found.critic / 2
    half = count_other_models(
        parse(describe(precision="bf16", ppo={"reward": "task", "reference": "none"})).config, Layout()
    )
    assert half.reference == 0.0
    assert half.writing == found.writing / 2


@pytest.mark.planned
def test_a_run_whose_policy_fits_alone_and_not_with_all_the_others_is_refused(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(replace(find_hardware("h100"), memory_gib=0.2, context_gib=0.0).to_dict()))
    plan = {"hardware": str(machine)}
    with phase_runner("ppo", describe(plan=plan, work_dir=str(tmp_path / "fits"))) as runner:
        runner.train()
    texts = (tmp_path / "fits" / "events-rank0.jsonl").read_text()
    assert "plan: 0.0" in texts
    assert any("reference" in line for line in texts.splitlines() if '"kind": "message"' in line)
    many = {"prompts": 65536, "max_rows": 65536}
    work_dir = str(tmp_path / "refused")
    with (
        refused(ConfigError, "0.3 GiB", "256.0 MiB", "rollout.max_rows", "posttrain.max_len", key="strategy"),
        phase_runner("ppo", describe(rollout=many, plan=plan, work_dir=work_dir)) as runner,
    ):
        runner.train()
