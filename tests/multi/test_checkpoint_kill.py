"""`kill -9` of any rank at any moment leaves the last good checkpoint, and training goes on from it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import CheckpointFolder, open_checkpoint, verify
from plait.config import parse_sections
from plait.distributed import open_world
from plait.trainer import Hook
from tests.multi.ranks import forked

KILLS = 50
RANKS = 2
SIZE = 1 << 19


class Large(nn.Module):
    """Makes checkpoints large, so that most kills hit a save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight[: len(x)] - x).square().mean()


class Tells(Hook):
    """Releases `ready` after so many steps. On a busy machine no time is long enough for a first save."""

    def __init__(self, ready: Any, steps: int) -> None:
        self.ready, self.left = ready, steps

    def before_step(self, runner: Any) -> None:
        if self.left == 0:
            self.ready.release()
        self.left -= 1


def train(rank: int, work_dir: str, meeting: str, strategy: str, async_save: bool, steps: int, ready: Any) -> None:
    """Save after every step, forever; `ready` is released after the first `steps` of them."""
    import torch.distributed as dist

    from plait import Runner

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    runner = Runner(
        model=Large(),
        data=[torch.ones(())] * 10**6,
        batch={"total": RANKS},
        optim={"type": "SGD", "lr": 0.1, "momentum": 0.9},
        train={"max_steps": 10**6},
        checkpoint={"every": 1, "keep": 2, "resume": "auto", "async_save": async_save},
        strategy=strategy,
        work_dir=work_dir,
        device="cpu",
        log={"console": "none", "sinks": []},
        hooks=[Tells(ready, steps)],
    )
    runner.train()


def test_a_run_killed_again_and_again_never_loses_ground(tmp_path: Path) -> None:
    context = forked()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    world = open_world(parse_sections(device="cpu").config)
    reached = 0
    for number in range(KILLS):
        ready = context.Semaphore(0)
        how = (random.choice(["ddp", "zero1", "zero3"]), random.random() < 0.5, random.randrange(4))
        arguments = (str(tmp_path / "run"), str(tmp_path / f"meeting-{number}"), *how, ready)
        ranks = [context.Process(target=train, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for _ in ranks:
            assert ready.acquire(timeout=120)
        moment, victim = random.uniform(0.0, 0.15), random.randrange(RANKS)
        time.sleep(moment)
        ranks[victim].kill()
        for process in ranks:  # the other one mostly notices and leaves; if not, it is ended, as a launcher would
            process.join(5)
            process.kill()
            process.join()
        newest = folder.newest()
        left = sorted(path.name for path in folder.root.iterdir()) if folder.root.exists() else []
        print(f"{how}: rank {victim} killed after {moment:.3f} s: {left}")
        if newest is None:
            assert reached == 0
            continue
        checkpoint = open_checkpoint(newest)
        verify(checkpoint, world=world)
        assert checkpoint.manifest.step >= reached
        reached = checkpoint.manifest.step
    assert reached > 0
    folder.sweep()
    assert {path.name for path in folder.root.iterdir()} == {"latest", *(path.name for path in folder.complete())}
