"""Ranks, launchers and hosts are killed at any step: every loss of every attempt is that of an undisturbed run.

A few fixed kills by default; sixty with `--fresh`, drawn anew: 20 ranks, 20 launchers and 20 hosts, half of them while
saves run in the background.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.multi import hosts as rig
from tests.multi.test_elastic import PLAIT, clean, wait_until

pytestmark = pytest.mark.timeout(900)  # each kill costs a start of all ranks
PAUSE_S = 0.02
RUN = """
import json, os, pathlib, sys, time
import torch
from torch import nn
from plait import Runner
from plait.trainer.hooks import Hook

work_dir, steps, background, pause = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "async", float(sys.argv[4])

class Notes(Hook):
    def after_step(self, runner, result):
        time.sleep(pause)
        line = [int(os.environ.get("PLAIT_ATTEMPT", "0")), runner.world.size, runner.step, result.loss, os.getpid()]
        with pathlib.Path(work_dir, f"losses{runner.world.rank}").open("a") as file:
            file.write(json.dumps(line) + "\\n")

def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

torch.set_num_threads(1)
rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
with Runner(
    model=model, data=list(rows), loss_fn=lambda out, _: out.square().mean(), hooks=[Notes()], batch={"total": 12},
    optim={"type": "AdamW", "lr": 0.001}, strategy="zero2", train={"max_steps": steps}, work_dir=work_dir, device="cpu",
    checkpoint={"every": 7, "resume": "auto", "async_save": background}, plan={"gate": "off"}, log={"console": "none"},
) as runner:
    runner.train()
"""

Line = tuple[int, int, int, float, int]
"""Attempt, number of ranks, step, loss, process."""


class Run:
    """A run of two ranks under the elastic launcher, which is started again whenever it was killed itself."""

    def __init__(self, folder: Path, mode: str, steps: int, words: list[str]) -> None:
        (folder / "run.py").write_text(RUN)
        self.folder, self.work_dir, self.steps = folder, folder / "run", steps
        arguments = ["run.py", str(self.work_dir), str(steps), mode, str(PAUSE_S)]
        self.command = [*PLAIT, *words, *arguments]
        self.launcher = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        env = clean() | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with (self.folder / "errors").open("ab") as errors:
            return subprocess.Popen(self.command, cwd=self.folder, env=env, stdout=errors, stderr=errors)

    def lines(self, rank: int = 0) -> list[Line]:
        path = self.work_dir / f"losses{rank}"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def told(self) -> str:
        return (self.folder / "errors").read_text()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        def ended() -> bool:
            assert self.launcher.poll() in (None, 0), self.told()
            return condition()

        wait_until(ended, f"{what}\n{self.told()}")

    def advance(self, steps: int, size: int = 2) -> None:
        """So many more steps, by so many ranks."""
        before = len(self.lines())
        wanted = lambda: sum(line[1] == size for line in self.lines()[before:]) >= steps  # noqa: E731
        self.wait_for(wanted, f"no {steps} steps of {size} ranks came")

    def kill_rank(self, rank: int) -> None:
        os.kill(self.lines(rank)[-1][4], signal.SIGKILL)

    def kill_launcher(self) -> None:
        pids = [self.lines(rank)[-1][4] for rank in range(2)]
        self.launcher.kill()
        self.launcher.wait()
        wait_until(lambda: not any(_runs(pid) for pid in pids), "ranks outlived their launcher")
        self.launcher = self.start()

    def finish(self) -> None:
        assert self.launcher.wait(timeout=600) == 0, self.told()

    def check(self, expected: dict[int, float]) -> None:
        """Each loss is the undisturbed one, no step is left out, and the last one is reached."""
        reached = 0
        for attempt, _, step, loss, _ in self.lines():
            assert loss == pytest.approx(expected[step], rel=1e-5), (attempt, step)
            assert step <= reached + 1
            reached = max(step, reached)
        assert reached == self.steps


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Step → loss of one process that nobody disturbs, for more steps than any run here has."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "run.py").write_text(RUN)
    words = [sys.executable, "run.py", str(folder / "run"), "400", "sync", "0"]
    subprocess.run(words, cwd=folder, env=clean(), check=True, timeout=200)
    lines = [json.loads(line) for line in (folder / "run" / "losses0").read_text().splitlines()]
    return {step: loss for _, _, step, loss, _ in lines}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Seeds: one by default, ten with `--fresh`."""
    seeds = range(10 if metafunc.config.getoption("--fresh", default=False) else 1)
    metafunc.parametrize("seed", [pytest.param(seed, id=f"seed{seed}") for seed in seeds])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_ranks_and_launchers_change_no_loss(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: dict[int, float], mode: str, seed: int
) -> None:
    dice = random.Random(f"{request.config.option.draw} {mode} {seed}")
    kills = ["rank", "launcher"]
    dice.shuffle(kills)
    run = Run(tmp_path, mode, 80, ["--nproc_per_node", "2"])
    try:
        for kill in kills:
            run.advance(dice.randrange(2, 20))
            if kill == "rank":
                run.kill_rank(dice.randrange(2))
            else:
                run.kill_launcher()
        run.finish()
    finally:
        run.launcher.kill()
    run.check(undisturbed)
    assert run.told().count("SIGKILL") == 1


@pytest.mark.real("sshd")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_hosts_change_no_loss(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: dict[int, float], mode: str, seed: int
) -> None:
    dice = random.Random(f"{request.config.option.draw} {mode} {seed}")
    host = dice.randrange(2)
    with rig.hosts(2, tmp_path / "rig") as two:
        quick = f"-F {two.config} -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
        words = ["--no_ssh_check", "-H", two.hostfile(1, 1), "--master_addr", two.addresses[0]]
        run = Run(tmp_path, mode, 80, [*words, "--launcher_args", quick])
        try:
            run.advance(dice.randrange(2, 20))
            two.crash(host)
            run.advance(10, size=1)
            run.finish()
        finally:
            run.launcher.kill()
        run.check(undisturbed)
        assert f"rank {host} on {two.addresses[host]}" in run.told()
