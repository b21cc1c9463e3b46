"""Host memory under the nvme tier, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUDGET = 48 << 20
RUN = """
import json, sys
import torch
from plait.config import parse_sections
from plait.engine import Preparation, prepare_native
from plait.distributed import open_world

sections = json.loads(sys.argv[1])
model = {"type": "llama", "vocab_size": 512, "dim": 384, "layers": 12, "heads": 6, "seq_len": 16}
config = parse_sections(model=model, **sections).config
engine = prepare_native(Preparation(config, open_world(config), log=lambda _: None))
ids = torch.randint(0, 512, (1, 16))
for _ in range(4):
    engine.train_step([{"input_ids": ids, "labels": ids}])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
numbers = sum(param.numel() for param in engine.model.parameters())
print(json.dumps({"peak": int(status["VmHWM"].split()[0]) << 10, "numbers": numbers}))
"""


def run(sections: dict[str, Any]) -> dict[str, int]:
    tight = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, json.dumps(sections)]
    done = subprocess.run(command, env={**os.environ, **tight}, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process")
def test_state_in_files_takes_no_more_host_memory_than_its_budget(tmp_path: Path) -> None:
    bare = run({"optim": {"type": "SGD"}})  # weights, gradients and activations, no state at all
    offload = {"optimizer": "nvme", "budget_gib": BUDGET / 2**30, "path": str(tmp_path)}
    found = run({"strategy": {"offload": offload}})
    state = 12 * found["numbers"]  # fp32 weights of its own, and two moments
    assert state > 4 * BUDGET
    assert found["peak"] - bare["peak"] < BUDGET
