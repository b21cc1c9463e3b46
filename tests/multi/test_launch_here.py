"""`plait launch` on this machine, as a user types it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import missing

PLAIT = [sys.executable, "-m", "plait", "launch"]
SUM = """
import json, os, pathlib, sys
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
about = {"total": total.item(), "argv": sys.argv[2:], "local": os.environ["LOCAL_RANK"]}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(about))
distributed.destroy_process_group()
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "sum.py").write_text(SUM)
    return tmp_path


def clean() -> dict[str, str]:
    marks = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "CUDA_VISIBLE")
    return {k: v for k, v in os.environ.items() if not k.startswith(marks)} | {"OMP_NUM_THREADS": "1"}


def run(work: Path, *commands: list[str]) -> list[str]:
    """All at the same time, to a good end; what they wrote to stderr."""
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen([*PLAIT, *words], cwd=work, env=clean(), stdout=pipe, stderr=pipe, text=True)
        for words in commands
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), errors
    return errors


def answers(work: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((work / "out" / str(rank)).read_text()) for rank in range(size)]


OPENMPI = ["--launcher", "openmpi", "--launcher_args", "--allow-run-as-root --oversubscribe"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--standalone"],
        ["--elastic_training", "--max_restarts", "1"],
        pytest.param(OPENMPI, marks=pytest.mark.real("mpirun.openmpi")),
        pytest.param(["--launcher", "mpich"], marks=pytest.mark.real("mpiexec.hydra")),
    ],
    ids=["local", "standalone", "elastic", "openmpi", "mpich"],
)
def test_two_ranks_meet_and_their_arguments_are_their_own(work: Path, flags: list[str]) -> None:
    run(work, [*flags, "--nproc_per_node", "2", "sum.py", "out", "--lr", "a b", "--local_rank", "7"])
    for rank, about in enumerate(answers(work, 2)):
        assert about == {"total": 2.0, "argv": ["--lr", "a b", "--local_rank", "7"], "local": str(rank)}


def test_hosts_that_are_started_by_hand_meet(work: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
    run(work, *([*words, "--node_rank", str(node), "sum.py", "out"] for node in range(2)))
    assert answers(work, 2) == [{"total": 2.0, "argv": [], "local": "0"}] * 2


def test_a_flag_on_the_wrong_side_is_pointed_out_and_passed_on(work: Path) -> None:
    (errors,) = run(work, ["--num_gpus", "1", "sum.py", "out", "--num_gpus", "2"])
    assert not missing(errors, "--num_gpus", "sum.py")
    assert answers(work, 1)[0]["argv"] == ["--num_gpus", "2"]


def test_the_pid_is_left_while_it_runs(work: Path) -> None:
    (work / "look.py").write_text("import os; print(open(f'/tmp/{os.getppid()}.ds').read() == str(os.getppid()))")
    command = [*PLAIT, "--save_pid", "--num_gpus", "1", "look.py"]
    done = subprocess.run(command, cwd=work, env=clean(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("words", [["launch", "--nproc_per_node", "1", "--no_python", "true"], ["doctor"]], ids=str)
def test_neither_launcher_nor_doctor_loads_torch(work: Path, words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "plait", *words]
    done = subprocess.run(command, cwd=work, env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert f"plait.cli.{words[0]}" in loaded
    assert not {"torch", "numpy"} & loaded


def test_autotuning_wants_a_run_that_is_described(work: Path) -> None:
    done = subprocess.run([*PLAIT, "--autotuning", "run", "sum.py"], cwd=work, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--autotuning run" in done.stderr


def test_autotuning_of_a_described_run_reaches_the_tuner(work: Path) -> None:
    words = ["--autotuning", "tune", "--no_python", "plait", "train", "absent.yaml"]
    done = subprocess.run([*PLAIT, *words], cwd=work, capture_output=True, text=True)
    assert done.returncode == 2
    assert "absent.yaml" in done.stderr


def test_the_report_of_the_machine_has_a_verdict_on_each_line() -> None:
    command = [sys.executable, "-m", "plait", "doctor", "--json"]
    lines = json.loads(subprocess.check_output(command, text=True, timeout=240))
    found = {line["name"]: line for line in lines}
    assert {"plait", "python", "torch", "gloo", "nccl", "memory", "open files", "deepspeed"} <= found.keys()
    assert all(line["verdict"] in ("ok", "note", "bad") for line in lines)
    assert found["gloo"]["value"] == "works"
