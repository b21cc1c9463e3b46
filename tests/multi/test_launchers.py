"""One script, unchanged, under every launcher."""

from __future__ import annotations

import json
import os
import random
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi.ranks import forked

SCRIPT = """
import json, pathlib, sys
import torch
from torch import nn
import plait
from plait.data import MicroBatch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
engine = plait.prepare(
    model, optim={"type": "SGD", "lr": 0.1}, strategy="zero2", device="cpu", loss_fn=lambda out, _: out.square().mean()
)
world = engine.world
rows = torch.linspace(-1, 1, 32).view(8, 4)[world.rank :: world.size]
losses = [engine.train_step([MicroBatch(rows, len(rows))]).loss for _ in range(3)]
about = {"rank": world.rank, "size": world.size, "local": world.ranks.local_rank, "launcher": world.ranks.launcher}
pathlib.Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps({**about, "losses": losses, "argv": sys.argv}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def clean() -> dict[str, str]:
    """The environment, without anything a launcher may have left in it."""
    marks = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "TORCHELASTIC")
    return {name: value for name, value in os.environ.items() if not name.startswith(marks)} | {"OMP_NUM_THREADS": "1"}


def run(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    processes = [
        subprocess.Popen(command, env={**clean(), **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in zip(commands, environments, strict=True)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


def run_as(script: Path, arguments: list[str], environments: list[dict[str, str]]) -> None:
    """The script in processes that some launcher started with these variables, without the seconds of loading torch."""
    context = forked()
    logs = [script.parent / f"{number}.log" for number in range(len(environments))]
    words = [str(script), *arguments]
    processes = [
        context.Process(target=_become, args=(words, {**clean(), **env}, log), daemon=True)
        for env, log in zip(environments, logs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
        process.join()
    outputs = [log.read_text() for log in logs if log.exists()]
    assert [process.exitcode for process in processes] == [0] * len(processes), "\n".join(outputs)


def _become(words: list[str], environment: dict[str, str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # what was loaded before has not seen OMP_NUM_THREADS
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def answers(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the script started by nothing but `python`."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    run([[sys.executable, str(folder / "train.py"), str(folder)]], [{}])
    (answer,) = answers(folder, 1)
    assert (answer["size"], answer["launcher"]) == (1, "none")
    losses: list[float] = answer["losses"]
    return losses


def slurm(rank: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def openmpi(rank: int, job: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"PMIX_NAMESPACE": str(job)}


def mpich(rank: int, job: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(("launcher", "word"), [(slurm, "slurm"), (openmpi, "mpi"), (mpich, "mpi")])
def test_ranks_that_slurm_or_mpi_started_find_each_other(
    script: Path, alone: list[float], launcher: Any, word: str
) -> None:
    job = random.SystemRandom().randrange(10**6)
    words = [str(script.parent), "--mine=1"]
    run_as(script, words, [launcher(rank, job) for rank in range(2)])
    for rank, answer in enumerate(answers(script.parent, 2)):
        assert (answer["rank"], answer["size"], answer["local"], answer["launcher"]) == (rank, 2, rank, word)
        assert answer["losses"] == pytest.approx(alone, rel=1e-5)
        assert answer["argv"] == [str(script), *words]


def test_torchrun_starts_it_and_leaves_its_arguments_alone(script: Path, alone: list[float]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    run([[*torchrun, str(script), str(script.parent), "--mine=1"]], [{}])
    for rank, answer in enumerate(answers(script.parent, 2)):
        assert (answer["rank"], answer["size"], answer["local"], answer["launcher"]) == (rank, 2, rank, "torchrun")
        assert answer["losses"] == pytest.approx(alone, rel=1e-5)
        assert answer["argv"] == [str(script), str(script.parent), "--mine=1"]


def test_torchruns_own_rendezvous_works_too(script: Path, alone: list[float]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([[*torchrun, str(script), str(script.parent)]], [{}])
    for answer in answers(script.parent, 2):
        assert answer["losses"] == pytest.approx(alone, rel=1e-5)


def test_inside_a_slurm_batch_script_a_process_is_alone(script: Path, alone: list[float]) -> None:
    batch = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    run_as(script, [str(script.parent)], [batch])
    (answer,) = answers(script.parent, 1)
    assert (answer["size"], answer["launcher"], answer["losses"]) == (1, "none", alone)
