"""`kill -9` at any moment leaves the last good checkpoint, and training goes on from it."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import CheckpointFolder, read_manifest, verify
from plait.config import parse_sections
from plait.world import open_world

KILLS = 8
SIZE = 1 << 19


class Large(nn.Module):
    """Makes checkpoints large, so that most kills hit a save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight[: len(x)] - x).square().mean()


def train(work_dir: str, started: Any) -> None:
    """Save after every step, forever; the moment it starts, `started` is set."""
    torch.set_num_threads(1)
    from plait import Runner

    runner = Runner(
        model=Large(),
        data=[torch.ones(())] * 10**6,
        optim={"type": "SGD", "lr": 0.1, "momentum": 0.9},
        train={"max_steps": 10**6},
        checkpoint={"every": 1, "keep": 2, "resume": "auto"},
        work_dir=work_dir,
        device="cpu",
        log={"console": "none", "sinks": []},
    )
    _ = runner.engine
    started.set()
    runner.train()


def test_a_run_killed_again_and_again_never_loses_ground(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "plait.runner"])
    folder = CheckpointFolder(tmp_path / "checkpoints")
    world = open_world(parse_sections(device="cpu").config)
    reached, moments = 0, []
    for _ in range(KILLS):
        started = context.Event()
        process = context.Process(target=train, args=(str(tmp_path), started))
        process.start()
        assert started.wait(120)
        moments.append(random.uniform(0.0, 0.25))
        time.sleep(moments[-1])
        process.kill()
        process.join()
        left = sorted(path.name for path in folder.root.iterdir()) if folder.root.exists() else []
        print(f"killed after {moments[-1]:.3f} s: {left}")
        newest = folder.newest()
        if newest is None:
            assert reached == 0
            continue
        manifest = read_manifest(newest)
        verify(newest, manifest, world=world)
        assert manifest.step >= reached
        reached = manifest.step
    assert reached > 0
    folder.sweep()
    assert all(path.is_symlink() or path in folder.complete() for path in folder.root.iterdir())
