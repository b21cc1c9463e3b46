"""Who am I: the environment of each launcher, and what is wrong with it."""

from __future__ import annotations

import os
import random

import pytest
from tests.refusals import refused

from plait.distributed import Ranks, detect_ranks
from plait.distributed.ranks import first_host
from plait.errors import WorldError


def torchrun(**changes: str) -> dict[str, str]:
    found = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
    }
    return found | changes


def slurm(**changes: str) -> dict[str, str]:
    found = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    }
    return found | changes


def mpi(flavour: str, **changes: str) -> dict[str, str]:
    prefix = {"openmpi": "OMPI_COMM_WORLD_", "mvapich": "MV2_COMM_WORLD_"}.get(flavour, "")
    names = [f"{prefix}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if flavour == "pmi":
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    return dict(zip(names, ("5", "8", "1", "4"), strict=True)) | changes


def test_without_a_launcher_a_process_is_alone() -> None:
    assert detect_ranks({"HOME": "/", "PATH": "/bin"}) == Ranks(0, 1, 0, 1, "none")


def test_torchrun_says_everything() -> None:
    assert detect_ranks(torchrun()) == Ranks(5, 8, 1, 4, "torchrun", "head", 1234)


def test_rank_and_size_alone_are_one_host() -> None:
    assert detect_ranks({"RANK": "1", "WORLD_SIZE": "2"}) == Ranks(1, 2, 1, 2, "torchrun", "127.0.0.1", 29500)


def test_torchrun_inside_a_slurm_step_or_under_mpi_wins() -> None:
    assert detect_ranks(slurm() | mpi("openmpi") | torchrun()).launcher == "torchrun"


def test_a_slurm_step_finds_rank_0_by_the_node_list() -> None:
    ranks = detect_ranks(slurm())
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == (5, 8, 1, 4)
    assert (ranks.launcher, ranks.address) == ("slurm", "gpu07")


def test_ranks_of_one_slurm_step_agree_on_a_port_and_steps_of_one_job_differ() -> None:
    job = str(random.randrange(10**6))
    ports = {detect_ranks(slurm(SLURM_JOB_ID=job, SLURM_PROCID=str(r))).port for r in range(8)}
    assert len(ports) == 1
    assert 1024 < min(ports) < 32768  # below the ports that the system hands out by itself
    assert detect_ranks(slurm(SLURM_JOB_ID=job, SLURM_STEP_ID="3")).port not in ports


def test_a_slurm_batch_script_is_no_step() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert detect_ranks(batch) == Ranks(0, 1, 0, 1, "none")


def test_the_slurm_job_names_the_hosts_where_the_step_does_not() -> None:
    env = slurm(SLURM_JOB_NODELIST="other1")
    del env["SLURM_STEP_NODELIST"]
    assert detect_ranks(env).address == "other1"


@pytest.mark.parametrize("flavour", ["openmpi", "mvapich", "pmi"])
def test_each_mpi_names_its_ranks(flavour: str) -> None:
    ranks = detect_ranks(mpi(flavour, MASTER_ADDR="head", MASTER_PORT="77"))
    assert ranks == Ranks(5, 8, 1, 4, "mpi", "head", 77)


def test_mpi_over_several_hosts_needs_an_address() -> None:
    with refused(WorldError, "8 MPI ranks", "MASTER_ADDR"):
        detect_ranks(mpi("openmpi"))


def test_mpi_on_one_host_takes_a_port_that_its_ranks_share() -> None:
    env = {name: value for name, value in mpi("pmi").items() if name != "MPI_LOCALNRANKS"}
    ranks = [detect_ranks({**env, "PMI_RANK": str(r)}) for r in range(8)]
    assert {(r.address, r.port) for r in ranks} == {("127.0.0.1", 20000 + os.getppid() % 10000)}
    named = [detect_ranks({**env, "PMIX_NAMESPACE": "prterun-a-99@1"}).port for _ in range(2)]
    assert named == [20991, 20991]


def test_mpi_ranks_of_several_hosts_agree_on_a_port_though_their_parents_differ() -> None:
    assert detect_ranks(mpi("pmi", MASTER_ADDR="head")).port == 29500


@pytest.mark.parametrize(
    ("env", "variable", "found"),
    [
        (torchrun(RANK="one"), "RANK", "'one'"),
        (torchrun(RANK=""), "RANK", "''"),
        (torchrun(WORLD_SIZE="2.0"), "WORLD_SIZE", "'2.0'"),
        (torchrun(LOCAL_RANK="x"), "LOCAL_RANK", "'x'"),
        (torchrun(MASTER_PORT="http"), "MASTER_PORT", "'http'"),
        ({"RANK": "0"}, "WORLD_SIZE", "launcher"),
        (slurm(SLURM_PROCID="?"), "SLURM_PROCID", "'?'"),
        (slurm(SLURM_STEP_NUM_TASKS="many"), "SLURM_STEP_NUM_TASKS", "'many'"),
        (mpi("mvapich", MV2_COMM_WORLD_SIZE="-", MASTER_ADDR="a"), "MV2_COMM_WORLD_SIZE", "'-'"),
        ({"PMI_RANK": "0"}, "PMI_SIZE", "launcher"),
        (torchrun(RANK="8"), "torchrun", "rank 8 of 8"),
        (torchrun(RANK="-1"), "torchrun", "rank -1 of 8"),
        (slurm(SLURM_PROCID="9"), "slurm", "rank 9 of 8"),
    ],
)
def test_a_malformed_environment_is_named(env: dict[str, str], variable: str, found: str) -> None:
    with refused(WorldError, variable, found, "launcher"):
        detect_ranks(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("a-b[3]", "a-b3"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("node[1-3]-ib,other", "node1-ib"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
        ("cn.example.org", "cn.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",a", "[1-2", "gpu[07-09"])
def test_a_node_list_without_a_first_host_is_refused(nodelist: str) -> None:
    with refused(WorldError, repr(nodelist), "MASTER_ADDR"):
        first_host(nodelist)
