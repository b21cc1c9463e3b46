"""Micro-batches that do not fit into memory: `plait train` splits them, and the run is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plait import Runner

MARKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "PLAIT_")
PARTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, room):
        super().__init__()
        self.room, self.calls = room, 0
        self.layer = nn.Linear(4, 3)
    def forward(self, x, y):
        self.calls += 1
        if len(x) > self.room and self.calls > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return F.cross_entropy(self.layer(x), y)

def points():
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(4, generator=draw), int(torch.randint(3, (), generator=draw))) for _ in range(24)]
"""
RUN = """
model: {{type: import, target: "parts:Net", args: {{room: {room}}}}}
data: {{type: import, target: "parts:points"}}
batch: {{total: 4}}
strategy: ddp
train: {{max_steps: 9}}
checkpoint: {{every: 2}}
log: {{every: 1, console: none}}
plan: {{gate: "off"}}
device: cpu
work_dir: {name}
"""


def train(folder: Path, name: str, room: int, ranks: int) -> subprocess.CompletedProcess[str]:
    (folder / "parts.py").write_text(PARTS)
    (folder / f"{name}.yaml").write_text(RUN.format(room=room, name=name))
    words = [sys.executable, "-m", "plait", "train", f"{name}.yaml", "--nproc", str(ranks)]
    env = {key: value for key, value in os.environ.items() if not key.startswith(MARKS)} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; of a step that was done again, the last one."""
    events = [json.loads(line) for line in (folder / "events-rank0.jsonl").read_text().splitlines()]
    return {event["step"]: event["data"]["loss"] for event in events if event["kind"] == "train"}


@pytest.mark.parametrize(("ranks", "room"), [(1, 2), (2, 1)])
def test_the_losses_are_those_of_a_device_with_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, room: int
) -> None:
    done = train(tmp_path, "small", room, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("batch.total") == 1
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    with Runner.from_config(yaml.safe_load(RUN.format(room=4, name=tmp_path / "large"))) as runner:
        runner.train()
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), rel=1e-5)
