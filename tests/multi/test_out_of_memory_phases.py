"""Phases whose micro-batches do not fit into memory start again with smaller ones, as `plait train` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.errors import GenerateError
from plait.generate import Sampling
from plait.posttrain.rl.rollout import RolloutSampler, Stop
from plait.posttrain.run import phase_runner
from tests.refusals import refused

MARKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "PLAIT_")
ROOM = """
import torch
from plait.trainer import Hook

class Room(Hook):
    priority = 1

    def __init__(self, rows, of):
        self.rows, self.of, self.runner = rows, of, None

    def before_run(self, runner):
        self.runner = runner
        model = runner.engine.model if self.of == "policy" else runner.roles.critic.model
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, module, args, kwargs):
        rows = len(kwargs["input_ids"] if "input_ids" in kwargs else args[0])
        # The policy is full when it is asked as a reference, before any step; the critic when it learns.
        begun = self.of == "policy" or (torch.is_grad_enabled() and self.runner.step > 2)
        if rows > self.rows and begun:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
RUN: dict[str, Any] = {
    "device": "cpu",
    "model": {"type": "llama", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "seq_len": 16},
    "posttrain": {"data": [{"type": "task", "samples": 60, "size": 1}], "val_fraction": 0.1},
    "optim": {"lr": 1e-2, "eps": 1e-3},
    "batch": {"total": 8},
    "train": {"max_steps": 5},
    "checkpoint": {"every": 2},
    "log": {"every": 1, "console": "none"},
    "plan": "off",
}
PHASES: dict[str, dict[str, Any]] = {
    "dpo": {"room": {"rows": 8, "of": "policy"}, "ranks": 1},  # pairs: 16 rows in a micro-batch
    "ppo": {
        "room": {"rows": 2, "of": "critic"},
        "ranks": 2,
        "rollout": {"prompts": 8, "max_new_tokens": 4},
        "ppo": {"reward": "task", "epochs": 4},
    },
}


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> loss, and the critic's where there is one; of a step that was done again, the last one."""
    events = [json.loads(line) for line in (folder / "events-rank0.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "train"]
    return {each["step"]: (each["data"]["loss"], each["data"].get("value_loss", 0.0)) for each in told}


@pytest.mark.parametrize("phase", PHASES)
def test_the_losses_are_those_of_a_device_with_more_room(tmp_path: Path, phase: str) -> None:
    changes = dict(PHASES[phase])
    room, ranks = changes.pop("room"), changes.pop("ranks")
    described = {**RUN, **changes}
    (tmp_path / "room.py").write_text(ROOM)
    full = {"work_dir": "small", "hooks": [{"type": "import", "target": "room:Room", "args": room}]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**described, **full}))
    words = [sys.executable, "-m", "plait", phase, "run.yaml", "--nproc", str(ranks)]
    env = {key: value for key, value in os.environ.items() if not key.startswith(MARKS)} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("batch.total") == 1
    with phase_runner(phase, {**described, "work_dir": str(tmp_path / "large")}) as runner:
        runner.train()
    small, large = losses(tmp_path / "small"), losses(tmp_path / "large")
    assert small.keys() == large.keys()
    for step, expected in large.items():
        assert small[step] == pytest.approx(expected, rel=1e-3, abs=1e-5), step


class Full:
    """A policy without room for the answers that it is to write."""

    mode = "gathered"

    def generate(self, *_: Any, **__: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_memory_that_is_short_for_writing_is_told_with_the_setting_that_helps() -> None:
    writer = RolloutSampler(Full(), None, None, lambda _: "", Stop((), ()))  # type: ignore[arg-type]
    with refused(GenerateError, "CUDA out of memory", "rollout.max_rows"):
        writer.write([], Sampling(), [])
