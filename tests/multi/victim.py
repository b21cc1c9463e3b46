"""A small training run that comes to harm: `victim.py WORK_DIR HOW RANK STEP [TIMEOUT] [STEPS] [BATCH] [EVERY]
[STRATEGY]`.

On one rank, after so many steps of the first attempt, something goes wrong. With `HOW` ending in `!` it goes wrong in
every attempt; ending in `*3`, in the first three, each time on another rank after another number of steps. `full3!` is
a device on which micro-batches of more than three rows have no room.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from plait import Runner
from plait.trainer.hooks import Hook

LEAKED: list[Tensor] = []
RANK, ATTEMPT = int(os.environ.get("RANK", "0")), int(os.environ.get("PLAIT_ATTEMPT", "0"))


def plan(how: str, rank: int, step: int) -> tuple[str, int, int]:
    """What goes wrong in this attempt: how, on which rank, after how many of its steps."""
    how, star, times = how.partition("*")
    if star and int(times) > ATTEMPT:
        dice = random.Random(1000 * rank + ATTEMPT)
        # Fewer than ten steps, of which five are saved at most: two attempts leave a third something to do.
        return how, dice.randrange(int(os.environ["WORLD_SIZE"])), dice.randrange(2, 10)
    return (how.rstrip("!"), rank, step) if ATTEMPT == 0 or how.endswith("!") else ("", rank, step)


def harm(how: str) -> None:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    elif how == "exception":
        raise ValueError("the sample is odd")
    elif how == "exit":
        os._exit(5)
    elif how == "sleep":
        time.sleep(600)
    elif how == "limit":
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + (64 << 20), here + (64 << 20)))
        torch.zeros(1 << 30)
    elif how == "stranger":  # the kernel kills somebody else of this control group; a while later somebody kills us
        eats = "held = []\nwhile True: held.append(b'x' * (1 << 24))"
        assert subprocess.run([sys.executable, "-c", eats], check=False).returncode == -signal.SIGKILL
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "leak":
        LEAKED.append(torch.ones(1 << 20))
        time.sleep(0.04)
    elif how == "eat":
        held = []
        while True:
            held.append(torch.ones(4 << 20))
            time.sleep(0.01)


class Net(nn.Module):
    def __init__(self, how: str, rank: int, step: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.plan = (how, rank, step)
        self.calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        how, rank, step = self.plan
        self.calls += 1
        if how.startswith("full") and rank == RANK and len(rows) > int(how[4:]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if rank == RANK and (self.calls == step + 1 or (how == "leak" and self.calls > step)):
            harm(how)
        return self.layer(rows).square().mean()


class Skips(Hook):
    """One rank takes a collective more than the others."""

    def __init__(self, how: str, rank: int, step: int) -> None:
        self.at = step if how == "skip" and rank != RANK else -1

    def after_step(self, runner: Any, result: Any) -> None:
        if runner.step == self.at:
            distributed.all_reduce(torch.zeros(7))


class Pauses(Hook):
    """One rank sleeps between two steps."""

    def __init__(self, how: str, rank: int, step: int) -> None:
        self.at = step if how == "pause" and rank == RANK else -1

    def after_step(self, runner: Any, result: Any) -> None:
        if runner.step == self.at:
            harm("sleep")


class Notes(Hook):
    """Writes down the loss of every step, of every attempt."""

    def after_step(self, runner: Any, result: Any) -> None:
        if RANK == 0:
            with Path(runner.config.work_dir, "losses").open("a") as file:
                file.write(json.dumps([ATTEMPT, runner.world.size, runner.step, result.loss, time.time()]) + "\n")


def train(
    work_dir: str, how: str = "", rank: str = "0", step: str = "0", timeout: str = "300", steps: str = "20",
    batch: str = "12", every: str = "5", strategy: str = "ddp",
) -> None:  # fmt: skip
    what = plan(how, int(rank), int(step))
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    with Runner(
        model=lambda: Net(*what),
        data=list(rows),
        hooks=[Skips(*what), Pauses(*what), Notes()],
        batch={"total": int(batch)},
        optim={"type": "AdamW", "lr": 0.01},
        strategy=strategy,
        train={"max_steps": int(steps)},
        checkpoint={"every": int(every)} if int(every) else {"last": False},
        work_dir=work_dir,
        device="cpu",
        plan={"gate": "off"},
        timeout_s=float(timeout),
        log={"console": "none"},
    ) as runner:
        runner.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*sys.argv[1:])
