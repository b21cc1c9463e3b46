"""Several engines in one process, as reinforcement learning has them: actor, critic, reference, reward."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.multi.test_launch_here import PLAIT, clean

ENGINES = """
import sys
import torch
import plait.frontends.deepspeed as deepspeed

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engines = []
for number in range(6):
    torch.manual_seed(number)
    config["zero_optimization"] = {"stage": number % 4}
    engines.append(deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)[0])
    for engine in engines:
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
print("steps", [engine.global_steps for engine in engines], flush=True)
"""


def test_six_engines_in_one_process_share_one_heartbeat(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES, encoding="utf-8")
    command = [*PLAIT, "--nproc_per_node", "2", "engines.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps [6, 5, 4, 3, 2, 1]") == 2
