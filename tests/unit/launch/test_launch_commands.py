"""What each launcher would run, as `--dry-run` shows it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refused

from plait.errors import WorldError
from plait.launch.environment import rendezvous_address, unused_hosts_note
from plait.launch.job import Job
from plait.launch.options import parse_options
from plait.launch.prepare import PreparedLaunch, prepare_launch
from plait.launch.rank import which_rank

HOSTS = "203.0.113.1 slots=2\n203.0.113.2 slots=2\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a hostfile, and no Slurm around it."""
    (tmp_path / "hosts").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    theirs = [name for name in os.environ if name.startswith(("MASTER_", "PET_"))]
    for name in ("SLURM_JOB_ID", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PDSH_SSH_ARGS_APPEND", *theirs):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return tmp_path


def setup(*words: str) -> PreparedLaunch:
    return prepare_launch(parse_options(words), words)


def job_in(words: list[str]) -> Job:
    return Job.from_json(words[words.index("--job") + 1])


def test_ssh_goes_to_every_host_with_the_job_on_stdin(place: Path) -> None:
    made = setup("-H", "hosts", "--ssh_port", "2222", "--launcher_args", "-i key", "t.py", "a b")
    commands = made.commands()
    assert made.launcher == "ssh"
    for node, command in enumerate(commands):
        assert command.argv[:3] == ("ssh", "-i", "key")
        assert " ".join(command.argv[-5:-1]) == f"-p 2222 -T 203.0.113.{node + 1}"
        assert shlex.split(command.argv[-1])[-4:] == ["-m", "plait.launch.agent", "--node", str(node)]
        assert shlex.split(command.argv[-1])[:3] == ["cd", str(place), "&&"]
        assert command.stdin is not None
        job = Job.from_json(command.stdin)
        assert (job.arguments, job.address, job.size) == (("a b",), "203.0.113.1", 4)
        assert job.environment["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_what_each_host_is_to_do_first_is_told_from_options(place: Path, launcher: str) -> None:
    words = ("-H", "hosts", "--launcher", launcher, "--launcher_args")
    command = setup(*words, "-x y source env.sh", "t.py").commands()[0]
    assert " ".join(command.argv).count("-x y") == 1
    assert shlex.split(command.argv[-1])[:7] == ["cd", str(place), "&&", ".", "./env.sh", "&&", "exec"]
    command = setup(*words, "module load 'cuda 12'", "t.py").commands()[0]
    assert "module load 'cuda 12' && exec" in command.argv[-1]
    assert "module" not in command.argv


def test_pdsh_runs_one_line_everywhere_and_doubles_its_percent_signs() -> None:
    (command,) = setup("-H", "hosts", "--launcher", "pdsh", "t.py", "50%").commands()
    assert command.argv[:3] == ("pdsh", "-S", "-R")
    assert "203.0.113.1,203.0.113.2" in command.argv
    words = shlex.split(command.argv[-1])
    assert words[-2:] == ["--node", "%n"]
    assert job_in(words).arguments == ("50%%",)


@pytest.mark.parametrize(
    ("family", "start", "hosts"),
    [
        ("openmpi", ["mpirun", "-n", "3", "--hostfile"], "203.0.113.1 slots=2\n203.0.113.2 slots=1\n"),
        ("mpich", ["mpiexec.hydra", "-n", "3", "-f"], "203.0.113.1:2\n203.0.113.2:1\n"),
        ("mvapich", ["mpiexec.hydra", "-n", "3", "-f"], "203.0.113.1:2\n203.0.113.2:1\n"),
        ("impi", ["mpirun", "-n", "3", "-f"], "203.0.113.1:2\n203.0.113.2:1\n"),
    ],
)
def test_mpirun_gets_the_chosen_slots(family: str, start: list[str], hosts: str) -> None:
    words = ("-H", "hosts", "--launcher", family, "--exclude", "203.0.113.2:0", "--launcher_args", "-v", "t.py")
    (command,) = setup(*words).commands()
    assert list(command.argv[:4]) == start
    assert command.files[command.argv[4]] == hosts
    assert "-v" in command.argv
    assert "NCCL_DEBUG" in " ".join(command.argv)
    assert job_in(list(command.argv)).nodes[1].slots == (1,)


def test_outside_an_allocation_slurm_gets_a_batch_file() -> None:
    words = ("--launcher", "slurm", "--num_nodes", "2", "--num_gpus", "4", "--launcher_args", "-p gpu", "t.py", "a b")
    (command,) = setup(*words).commands()
    assert command.argv == ("sbatch", "t.sbatch")
    lines = command.files["t.sbatch"].splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked == {
        "--job-name=t",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--output=t-%j.out",
        "-p gpu",
    }
    assert lines[-1].endswith("launch --launcher=slurm --num_nodes=2 --num_gpus=4 -- t.py 'a b'")


def test_the_local_launcher_shows_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    made = setup("--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--pass_local_rank", "-m", "pkg.t", "--x")
    assert made.launcher == "local"
    for rank, command in enumerate(made.commands()):
        assert command.argv == (sys.executable, "-u", "-m", "pkg.t", f"--local_rank={rank}", "--x")
        assert command.environment["RANK"] == str(rank)
        assert f"RANK={rank} " in command.shown()


def test_what_is_shown_can_be_run(place: Path) -> None:
    (place / "t.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv[1:])")
    (command,) = setup("--nproc_per_node", "1", "t.py", "a 'b'").commands()
    said = subprocess.run(["bash", "-c", command.shown()], capture_output=True, text=True, check=True)
    assert said.stdout == "0 [\"a 'b'\"]\n"


def test_torchruns_way_starts_the_ranks_of_one_host_of_several() -> None:
    words = ["--nnodes", "3", "--node_rank", "1", "--nproc_per_node", "2", "--master_addr", "203.0.113.9", "t.py"]
    made = setup(*words)
    found = [command.environment for command in made.commands()]
    assert [each["RANK"] for each in found] == ["2", "3"]
    assert found[0]["WORLD_SIZE"] == "6"
    assert found[0]["MASTER_ADDR"] == "203.0.113.9"


@pytest.mark.parametrize(
    "words",
    [
        ["--elastic_training", "--rdzv_conf", "timeout=60", "--nproc_per_node", "2"],
        ["--rdzv_backend", "c10d", "--rdzv_endpoint", "h:1", "--nnodes", "1:3", "--nproc_per_node", "2"],
        ["--standalone", "--nproc_per_node", "2"],
    ],
)
def test_torchruns_own_flags_bring_torchs_agent(words: list[str]) -> None:
    (command,) = setup(*words, "t.py", "--x").commands()
    assert command.argv[1:3] == ("-m", "torch.distributed.run")
    assert "--nproc-per-node=2" in command.argv
    assert command.argv[-2:] == ("t.py", "--x")
    assert command.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "RANK" not in command.environment


def test_hosts_of_torchs_agent_may_fail_down_to_the_least() -> None:
    words = ["--elastic_training", "--min_elastic_nodes", "1", "--num_gpus", "2", "--rdzv_backend", "c10d"]
    made = setup("-H", "hosts", *words, "t.py")
    job = made.final_job()
    assert job.spare == 1
    assert job.once_per_node
    assert "--nnodes=1:2" in job.program
    assert "--rdzv-endpoint=203.0.113.1:29500" in job.program
    conf = [job.variables(place, {})["PET_RDZV_CONF"] for node in (0, 1) for place in job.started_on(node)]
    assert conf == ["is_host=1", "is_host=0"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--num_nodes", "2", "t.py"], ["--num_nodes 2", "--hostfile", "--nnodes"]),
        (["--nnodes", "2", "t.py"], ["--nnodes 2", "--master_addr", "--node_rank", "1"]),
        (["--nnodes", "2:x", "t.py"], ["--nnodes '2:x'"]),
        (["--nnodes", "2:4", "t.py"], ["--nnodes 2:4", "--rdzv_endpoint"]),
        (["--launcher", "ssh", "t.py"], ["--launcher ssh", "--hostfile"]),
        (["-H", "hosts", "--launcher", "local", "t.py"], ["--launcher local", "ssh"]),
        (["-H", "absent", "t.py"], ["hostfile", "absent"]),
        (["--launcher", "slurm", "-H", "hosts", "t.py"], ["--hostfile hosts", "Slurm"]),
        (["--launcher", "mpich", "--elastic_training", "t.py"], ["--launcher mpich", "ssh"]),
        (["--launcher", "pdsh", "--elastic_training", "t.py"], ["--launcher pdsh", "ssh"]),
        (["--standalone", "--pass_local_rank", "t.py"], ["--pass_local_rank", "elastic"]),
        (["--nproc_per_node", "many", "t.py"], ["--nproc_per_node 'many'", "gpu, cpu"]),
        (["-i", "localhost:5", "--nproc_per_node", "2", "t.py"], ["'localhost'", "slot 5"]),
        (["-H", "hosts", "--nproc_per_node", "5", "t.py"], ["5", "2 slots"]),
    ],
)
def test_what_cannot_be_started_is_explained(words: list[str], names: list[str]) -> None:
    with refused(WorldError, *names):
        setup(*words).commands()


def test_a_port_that_was_fixed_and_is_taken_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with refused(WorldError, f"--master_port {holder.getsockname()[1]}", "process"):
            setup("--nproc_per_node", "2", "--master_port", str(holder.getsockname()[1]), "t.py")


def test_a_rank_of_mpi_or_slurm_knows_its_number() -> None:
    assert which_rank({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 4) == 2
    assert which_rank({"PMI_RANK": "1", "PMI_SIZE": "2"}, 2) == 1
    assert which_rank({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 4) == 3
    with refused(WorldError, "2 processes", "4 ranks"):
        which_rank({"PMI_RANK": "1", "PMI_SIZE": "2"}, 4)
    with refused(WorldError, "MPI", "Slurm", "plait.launch.rank"):
        which_rank({}, 1)


def test_an_exported_port_is_taken_and_a_flag_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        free = str(holder.getsockname()[1])
    monkeypatch.setenv("MASTER_PORT", free)
    assert setup("--nproc_per_node", "2", "t.py").job.port == int(free)
    assert setup("-H", "hosts", "t.py").job.port == int(free)
    assert setup("-H", "hosts", "--master_port", "31111", "t.py").job.port == 31111
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.7")
    assert setup("-H", "hosts", "t.py").job.address == "203.0.113.7"
    with refused(WorldError, "MASTER_ADDR", "203.0.113.7", "--nnodes"):
        setup("--nproc_per_node", "2", "t.py")
    monkeypatch.setenv("MASTER_PORT", "many")
    with refused(WorldError, "MASTER_PORT", "'many'"):
        setup("-H", "hosts", "t.py")


def test_an_exported_port_that_is_taken_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
        with refused(WorldError, f"MASTER_PORT {holder.getsockname()[1]}", "process"):
            setup("--nproc_per_node", "2", "t.py")
        with refused(WorldError, f"MASTER_PORT {holder.getsockname()[1]}", "process"):
            rendezvous_address()


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_that_nobody_can_join_is_refused(port: str) -> None:
    with refused(WorldError, f"--master_port {port}", "65535"):
        setup("-H", "hosts", "--master_port", port, "t.py")


def test_the_variables_of_torchrun_say_how_many_hosts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"NNODES": "3", "NODE_RANK": "1", "NPROC_PER_NODE": "2", "MASTER_ADDR": "203.0.113.9", "MASTER_PORT": "3"}
    for name, value in found.items():
        monkeypatch.setenv(f"PET_{name}", value)
    made = [command.environment for command in setup("t.py").commands()]
    assert [each["RANK"] for each in made] == ["2", "3"]
    assert (made[0]["WORLD_SIZE"], made[0]["MASTER_ADDR"], made[0]["MASTER_PORT"]) == ("6", "203.0.113.9", "3")
    with pytest.raises(WorldError, match="PET_NNODES=3"):
        rendezvous_address()


def test_hosts_of_a_slurm_job_that_nobody_uses_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "2 hosts" in (unused_hosts_note() or "")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert unused_hosts_note() is None
