"""A run goes on when ranks are killed and hosts are cut off: nothing is lost, nothing repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multi import hosts as rig
from tests.multi import victim
from tests.refusals import missing

PLAIT = [sys.executable, "-m", "plait", "launch", "--elastic_training"]
VICTIM = str(Path(__file__).with_name("victim.py"))
MARKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "PLAIT_")
STEPS = 20


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(MARKS)} | {"OMP_NUM_THREADS": "1"}


def undisturbed(tmp_path: Path) -> dict[int, float]:
    """Step → loss of the same run on one process that nobody disturbs."""
    victim.train(str(tmp_path / "alone"), steps=str(STEPS))
    return {step: loss for _, _, step, loss, _ in losses(tmp_path / "alone")}


def losses(work_dir: Path) -> list[tuple[int, int, int, float, float]]:
    """Attempt, number of ranks, step, loss, time, in the order in which they came."""
    path = work_dir / "losses"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


Losses = list[tuple[int, int, int, float, float]]


def assert_as_if_nothing_had_happened(found: Losses, expected: dict[int, float]) -> None:
    """Every attempt goes on right after a checkpoint, and each step has the loss of the undisturbed run."""
    first: dict[int, int] = {}
    for attempt, _, step, loss, _ in found:
        assert loss == pytest.approx(expected[step], rel=1e-5, abs=1e-7), (attempt, step)
        assert step == first.setdefault(attempt, step) + sum(1 for a, _, s, _, _ in found if a == attempt and s < step)
    reached = 0
    for attempt, start in sorted(first.items()):
        assert (start - 1) % 5 == 0
        assert start - 1 <= reached  # no step is left out
        reached = max(step for a, _, step, _, _ in found if a == attempt)
    assert reached == max(expected)


def test_ranks_that_are_killed_again_and_again_change_nothing(tmp_path: Path) -> None:
    kills, dice = 2, random.randrange(1000)
    words = ["--nproc_per_node", "3", VICTIM, str(tmp_path / "run"), f"SIGKILL*{kills}", str(dice), "0"]
    done = subprocess.run([*PLAIT, *words], env=clean(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert [f"{attempt} of 100" in done.stderr for attempt in (kills, kills + 1)] == [True, False]
    found = losses(tmp_path / "run")
    assert {attempt for attempt, *_ in found} >= {kills}
    assert_as_if_nothing_had_happened(found, undisturbed(tmp_path))


def test_a_slot_that_fails_twice_in_the_same_place_is_left_out_and_the_batch_is_kept(tmp_path: Path) -> None:
    words = ["--nproc_per_node", "2", VICTIM, str(tmp_path / "run"), "SIGKILL!", "1", "2"]
    done = subprocess.run([*PLAIT, *words], env=clean(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert any(not missing(line, "slot 1", "localhost") for line in done.stderr.splitlines())
    assert any(not missing(line, "1 rank", "2 of 100") for line in done.stderr.splitlines())
    found = losses(tmp_path / "run")
    assert [size for _, size, step, *_ in found if step == STEPS] == [1]
    assert_as_if_nothing_had_happened(found, undisturbed(tmp_path))


def test_micro_batches_that_do_not_fit_are_split_and_the_batch_is_kept(tmp_path: Path) -> None:
    words = ["--nproc_per_node", "2", VICTIM, str(tmp_path / "run"), "full3!", "1", "0"]
    done = subprocess.run([*PLAIT, *words], env=clean(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if not missing(line, "rank 1", "GPU", "batch.total")]
    assert len(told) == 1  # of 6, and then of 3
    found = losses(tmp_path / "run")
    assert {(attempt, size) for attempt, size, *_ in found} == {(1, 2)}
    assert_as_if_nothing_had_happened(found, undisturbed(tmp_path))


KNOWS = """
import sys
from plait.errors import DataError
from plait.launch import report_failure as tell
tell(DataError("no text"))
sys.exit(2)
"""


def test_an_error_that_would_come_again_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(KNOWS)
    words = ["--nproc_per_node", "2", str(tmp_path / "t.py")]
    done = subprocess.run([*PLAIT, *words], env=clean(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "plait: no text"
    assert " of 100" not in second


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.real("sshd")
def test_a_host_that_is_cut_off_is_done_without_until_it_is_back(tmp_path: Path) -> None:
    work_dir = tmp_path / "run"
    with rig.hosts(2, tmp_path / "rig") as two:
        quick = f"-F {two.config} -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
        words = [
            "--no_ssh_check",
            "-H",
            two.hostfile(1, 1),
            "--master_addr",
            two.addresses[0],
            "--launcher_args",
            quick,
        ]
        command = [*PLAIT, *words, VICTIM, str(work_dir), "", "0", "0", "300", "1000000"]
        env = clean() | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            try:
                wait_until(lambda: sizes(work_dir)[-1:] == [2], "the run did not start")
                time.sleep(2.5)  # heartbeats come from other hosts once a second
                two.unplug(1)
                wait_until(lambda: sizes(work_dir)[-1:] == [1], "it did not go on with one host")
                page = (work_dir / "report.txt").read_text()
                two.plug_in(1)
                wait_until(lambda: sizes(work_dir)[-1:] == [2], "the host that came back did not join")
            finally:
                process.send_signal(signal.SIGINT)
                time.sleep(1.0)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
    assert f"rank 1 on {two.addresses[1]}" in page, errors
    attempts = [(attempt, step) for attempt, _, step, *_ in losses(work_dir)]
    last = max(step for attempt, step in attempts if attempt == 1)
    assert next(step for attempt, step in attempts if attempt == 2) == last + 1  # asked to leave, they saved first


def sizes(work_dir: Path) -> list[int]:
    return [size for _, size, *_ in losses(work_dir)]
