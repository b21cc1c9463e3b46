"""Whatever ends a run, one page names the rank, what it was doing, and why."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.refusals import missing

PLAIT = [sys.executable, "-m", "plait", "launch"]
VICTIM = str(Path(__file__).with_name("victim.py"))
MARKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "PLAIT_")


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(MARKS)} | {"OMP_NUM_THREADS": "1"}


def run(
    work_dir: Path,
    how: str,
    *flags: str,
    ranks: int = 2,
    timeout: float = 120.0,
    group: Path | None = None,
    strategy: str = "ddp",
    steps: int = 20,
) -> tuple[int, str]:
    """A run in which rank 1 comes to harm after 6 steps: the exit code, and the page."""
    words = ["--nproc_per_node", str(ranks), *flags, VICTIM, str(work_dir), how, "1", "6", str(timeout)]
    words += [str(steps), "12", "5", strategy]
    join = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    env = {**clean(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*PLAIT, *words], env=env, capture_output=True, text=True, timeout=280, preexec_fn=join, check=False
    )
    assert (work_dir / "report.txt").exists(), done.stderr
    page = (work_dir / "report.txt").read_text()
    assert page in done.stderr  # the console has the same
    return done.returncode, page


def blamed(page: str) -> str:
    """The line that names the cause, and what that rank was doing."""
    return page.split("\n\n")[1]


@pytest.mark.parametrize(
    ("how", "code", "named"),
    [
        ("SIGKILL", 128 + signal.SIGKILL, ["SIGKILL", "not ", "memory"]),
        ("SIGSEGV", 128 + signal.SIGSEGV, ["SIGSEGV"]),
        ("exception", 1, ["ValueError: the sample is odd"]),
        ("exit", 5, ["exit code 5"]),
        ("limit", 1, ["memory", "RuntimeError: "]),
    ],
)
def test_a_rank_that_fails_is_named_before_its_victims(tmp_path: Path, how: str, code: int, named: list[str]) -> None:
    found, page = run(tmp_path / "run", how)
    assert found == code, page
    assert blamed(page).startswith("rank 1 "), page
    assert not missing(blamed(page), *named, "forward", "step 6"), page
    assert "\n  rank 0: " in page.partition("The others:")[2]
    if how == "SIGSEGV":
        assert re.search(r'Stack of rank 1.*\n.* in string_at\n.*victim.py", line \d+ in harm', page), page
    if how == "exception":
        last = page.partition("Last lines of rank 1:")[2]
        assert "raise ValueError" in last
        assert "[rank0]" not in last


WORKER = """
import os, signal
import torch
import plait

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index == 37:
            assert torch.utils.data.get_worker_info() is not None
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)

with plait.Runner(
    model=lambda: torch.nn.Linear(4, 1), data=torch.utils.data.DataLoader(Points(), batch_size=2, num_workers=2),
    loss_fn=lambda out, _: out.square().mean(), optim={"type": "SGD", "lr": 0.1}, strategy="ddp", device="cpu",
    train={"max_epochs": 1}, plan={"gate": "off"}, work_dir="run",
) as runner:
    runner.train()
"""


def test_a_data_worker_that_is_killed_is_told_as_killed(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    words = [*PLAIT, "--nproc_per_node", "2", "worker.py"]
    done = subprocess.run(words, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    page = (tmp_path / "run" / "report.txt").read_text()
    assert not missing(blamed(page), "data worker", "Killed", "not ", "memory"), page


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group that may hold so many bytes, of either version."""
    root = Path("/sys/fs/cgroup")
    name = f"plait{random.SystemRandom().randrange(10**9)}"
    second = (root / "cgroup.controllers").exists()
    folder = root / name if second else root / "memory" / name
    folder.mkdir()
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (folder / swap).exists():
                (folder / swap).write_text("0" if second else str(limit))
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.real("cgroup")
def test_memory_that_the_host_does_not_have_is_told_from_other_kills(tmp_path: Path) -> None:
    with memory_group(1200 << 20) as group:
        code, page = run(tmp_path / "run", "eat", group=group)
    assert code == 128 + signal.SIGKILL
    assert blamed(page).startswith("rank 1 "), page
    assert not missing(blamed(page), "kernel", "memory", "1.2 GiB"), page
    assert not missing(page, "forward", "step 6", "limit 1.17 GiB")
    assert re.search(r"peak [\d.]+ GiB", page), page


@pytest.mark.real("cgroup")
def test_a_kill_that_was_another_process_s_is_not_taken_for_the_ranks(tmp_path: Path) -> None:
    with memory_group(1200 << 20) as group:
        code, page = run(tmp_path / "run", "stranger", "--max_restarts", "0", group=group)
    assert code == 128 + signal.SIGKILL
    assert blamed(page).startswith("rank 1 "), page
    assert not missing(blamed(page), "SIGKILL", "not ", "memory"), page


@pytest.mark.real("cgroup")
def test_memory_that_grows_from_step_to_step_is_named_and_nothing_is_split(tmp_path: Path) -> None:
    with memory_group(1200 << 20) as group:
        code, page = run(tmp_path / "run", "leak!", "--max_restarts", "1", group=group, steps=2000)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"\d\.\d+ GiB from step \d+ to \d+", page), page
    assert not (tmp_path / "run" / "split").exists()


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Three runs that hang, at the same time: most of it is waiting."""
    folder = tmp_path_factory.mktemp("hangs")
    with ThreadPoolExecutor(3) as pool:
        runs = {"sleep": ("sleep", 2, "ddp"), "skip": ("skip", 3, "ddp"), "sharded": ("pause", 2, "zero3")}
        found = {
            name: pool.submit(run, folder / name, how, ranks=ranks, timeout=20.0, strategy=strategy)
            for name, (how, ranks, strategy) in runs.items()
        }
        return {name: future.result() for name, future in found.items()}


def test_a_rank_that_sleeps_while_the_others_wait_is_named_with_all_stacks(hangs: dict[str, tuple[int, str]]) -> None:
    code, page = hangs["sleep"]
    assert code == 1  # not the signal with which the launcher ended them: 143 would look like a run that saved and left
    assert "hangs" in page.partition("\n")[0]
    assert blamed(page).startswith("rank 1 "), page
    assert not missing(blamed(page), "all_reduce", "forward", "step 6")
    assert not missing(page.partition("The others:")[2], "rank 0", "all_reduce")
    asleep, awake = (page.partition(f"Stack of rank {rank}, ")[2].partition("\n\n")[0] for rank in (1, 0))
    assert "in harm" in asleep
    assert "ddp.py" in awake  # in the exchange of gradients


def test_a_rank_that_waits_for_messages_of_another_is_seen_to_wait(hangs: dict[str, tuple[int, str]]) -> None:
    code, page = hangs["sharded"]
    assert code == 1
    assert "hangs" in page.partition("\n")[0]
    assert blamed(page).startswith("rank 1 "), page
    assert "all_gather" in blamed(page)
    assert not missing(page.partition("The others:")[2], "rank 0", "all_gather")
    assert "fsdp.py" in page.partition("Stack of rank 0, ")[2]


def test_a_rank_that_leaves_a_collective_out_is_the_odd_one(hangs: dict[str, tuple[int, str]]) -> None:
    code, page = hangs["skip"]
    assert code != 0
    assert blamed(page).startswith("rank 1 "), page
    assert not missing(page, "steps", "collectives", "order")


def test_a_script_that_is_not_of_plait_is_explained_too(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': print('so long'); os.abort()\ntime.sleep(60)\n")
    logs = tmp_path / "logs"
    words = ["--nproc_per_node", "2", "--enable_each_rank_log", str(logs), str(script)]
    done = subprocess.run([*PLAIT, *words], env=clean(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGABRT
    page = (logs / "report.txt").read_text()
    assert blamed(page).startswith("rank 1 ")
    assert "SIGABRT" in blamed(page)
    assert "Last lines of rank 1:\n  so long" in page


@pytest.mark.real("mpiexec.hydra")
def test_a_killed_rank_of_mpich_is_explained_too(tmp_path: Path) -> None:
    code, page = run(tmp_path / "killed", "SIGKILL", "--launcher", "mpich")
    assert code == 128 + signal.SIGKILL
    assert re.search(r"^rank 1 .*SIGKILL.*\bnot\b.*memory", page, re.MULTILINE), page


@pytest.mark.real("mpirun.openmpi")
def test_ranks_of_openmpi_that_hang_are_explained_too(tmp_path: Path) -> None:
    openmpi = ["--launcher", "openmpi", "--launcher_args", "--allow-run-as-root --oversubscribe"]
    code, page = run(tmp_path / "asleep", "sleep", *openmpi, timeout=45.0)
    assert code != 0
    assert "all_reduce" in blamed(page), page
    assert "Stack of rank 1" in page, page
