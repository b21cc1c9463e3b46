"""A tiny run that can be told to go wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

HOOK = """
import os, signal, subprocess, sys, time
from pathlib import Path
import torch
from plait.trainer import Hook

class Trouble(Hook):
    def __init__(self, kind, rank=0):
        self.kind, self.rank = kind, rank

    def before_run(self, runner):
        if runner.world.rank != self.rank:
            return
        if self.kind == "memory":
            raise MemoryError("planted: no room for 7 GiB")
        if self.kind == "device" and runner.world.ranks.split == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Planted.")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "crash":
            raise RuntimeError("planted: a shape does not fit")
        if self.kind == "hang" or (self.kind == "slow" and Path("slow").exists()):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
            Path("pids.new").write_text(f"{os.getpid()} {child.pid}")
            os.replace("pids.new", "pids")
            time.sleep(600)
"""


class Bench:
    """A folder with a run description, a corpus and a hook in it, and itself the current folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trouble.py").write_text(HOOK)
        lines = (f"line {i}: {random.random()} and {random.random()}\n" for i in range(80))
        (folder / "corpus.txt").write_text("".join(lines))

    def describe(self, kind: str = "none", **changes: Any) -> str:
        text = {"type": "text", "path": "corpus.txt", "vocab_size": 300, "seq_len": 16, "cache": "cache"}
        run = {
            "work_dir": "run",
            "device": "cpu",
            "model": {"type": "gpt", "vocab_size": 300, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16},
            "data": {**text, "split": "train"},
            "batch": {"total": 4},
            "train": {"max_steps": 50},
            "hooks": [{"type": "import", "target": "trouble:Trouble", "args": {"kind": kind}}],
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump({**run, **changes}))
        return "run.yaml"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)
