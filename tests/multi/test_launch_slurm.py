"""`plait launch --launcher slurm` under a real Slurm of one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multi import slurm as rig
from tests.real import unavailable
from tests.refusals import missing

pytestmark = pytest.mark.real("slurm")
PLAIT = [sys.executable, "-m", "plait", "launch", "--launcher", "slurm"]

SUM = """
import json, os, pathlib, sys
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
about = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_DEBUG")}
pathlib.Path(sys.argv[1], about["RANK"]).write_text(json.dumps(about | {"total": total.item(), "argv": sys.argv[2:]}))
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "LOCAL_", "MASTER_"))}
    try:
        with rig.slurm(tmp_path_factory.mktemp("slurm")) as variables:
            yield {**keep, **variables, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
    except RuntimeError as error:
        unavailable(str(error))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "end.py").write_text("import os, sys; sys.exit(5 * int(os.environ['RANK']))")
    note = "import os, pathlib, time; pathlib.Path('out', os.environ['RANK']).write_text(str(os.getpid()))\n"
    (tmp_path / "sleep.py").write_text(note + "time.sleep(600)\n")
    return tmp_path


def inside(work: Path, cluster: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """In an allocation of two tasks."""
    command = ["salloc", "--ntasks-per-node=2", "--nodes=1", *PLAIT, *words]
    return subprocess.run(command, cwd=work, env=cluster, capture_output=True, text=True, timeout=120)


def assert_summed(work: Path) -> None:
    for rank in range(2):
        about = json.loads((work / "out" / str(rank)).read_text())
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        assert about == {**expected, "NCCL_DEBUG": "WARN", "total": 2.0, "argv": ["--lr", "a b"]}


def test_inside_an_allocation_srun_starts_the_ranks(work: Path, cluster: dict[str, str]) -> None:
    done = inside(work, cluster, "sum.py", "out", "--lr", "a b")
    assert done.returncode == 0, done.stderr
    assert_summed(work)


def test_the_exit_code_of_the_worst_rank_comes_back_with_its_page(work: Path, cluster: dict[str, str]) -> None:
    done = inside(work, cluster, "end.py")
    assert done.returncode == 5
    assert any(not missing(line, "rank 1", "exit code 5") for line in done.stderr.splitlines()), done.stderr


def test_outside_of_one_a_batch_job_is_submitted_and_does_the_same(work: Path, cluster: dict[str, str]) -> None:
    words = ["--nproc_per_node", "2", "--launcher_args", "--time=5 --comment=x", "sum.py", "out", "--lr", "a b"]
    done = subprocess.run([*PLAIT, *words], cwd=work, env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    assert "Submitted batch job" in done.stdout
    deadline = time.monotonic() + 90
    while len(texts := [path.read_text() for path in (work / "out").iterdir()]) < 2 or not all(texts):
        assert time.monotonic() < deadline, (work / f"sum-{job}.out").read_text()
        time.sleep(0.1)
    assert_summed(work)


def test_sbatch_accepts_the_file_for_several_hosts(work: Path, cluster: dict[str, str]) -> None:
    words = ["--dry-run", "--num_nodes", "1", "--nproc_per_node", "3", "sum.py"]
    shown = subprocess.run([*PLAIT, *words], cwd=work, env=cluster, capture_output=True, text=True, timeout=60).stdout
    text = shown.partition("<<'END'\n")[2].partition("\nEND\n")[0]
    (work / "shown.sbatch").write_text(text + "\n")
    tried = ["sbatch", "--test-only", "shown.sbatch"]
    done = subprocess.run(tried, cwd=work, env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "using 3 processors" in done.stderr


def test_an_interrupt_ends_the_step(work: Path, cluster: dict[str, str]) -> None:
    command = ["salloc", "--ntasks-per-node=2", "--nodes=1", *PLAIT, "sleep.py"]
    process = subprocess.Popen(command, cwd=work, env=cluster, stderr=subprocess.PIPE, process_group=0, text=True)
    deadline = time.monotonic() + 60
    while len(found := [path.read_text() for path in (work / "out").iterdir()]) < 2 or not all(found):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    while any(Path("/proc", pid).exists() for pid in found):
        assert time.monotonic() < deadline, "ranks are still there"
        time.sleep(0.05)
