"""A job: who runs where, with which variables, cores and devices."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refused

from plait.errors import WorldError
from plait.launch.job import Job, Node, available_cores, cores_of, parse_cores
from plait.launch.local import run_job
from plait.launch.network import check_port, free_port, interface_of, is_this_host, port_is_free, route_to
from plait.launch.prepare import forwarded_variables, read_env_file
from plait.launch.records import RankRecord, exit_code, record_end

NODES = (Node("a", (0, 2)), Node("b", (1,)))


def test_ranks_are_given_out_host_by_host() -> None:
    places = Job(("x",), NODES).placements()
    found = [(p.rank, p.host, p.node, p.local_rank, p.local_size, p.slot) for p in places]
    assert found == [(0, "a", 0, 0, 2, 0), (1, "a", 0, 1, 2, 2), (2, "b", 1, 0, 1, 1)]


def test_a_rank_gets_torchruns_variables() -> None:
    job = Job(("x",), NODES, address="10.0.0.1", port=7, environment={"NCCL_DEBUG": "INFO"})
    assert job.variables(job.placements()[2], {}) == {
        "NCCL_DEBUG": "INFO",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7",
    }


@pytest.mark.parametrize(
    ("present", "expected"),
    [({}, "0,2"), ({"CUDA_VISIBLE_DEVICES": "4,5,7"}, "4,7"), ({"CUDA_VISIBLE_DEVICES": ""}, None)],
)
def test_slots_count_within_the_devices_that_are_visible(present: dict[str, str], expected: str | None) -> None:
    job = Job(("x",), NODES, devices=True)
    assert job.variables(job.placements()[0], present).get("CUDA_VISIBLE_DEVICES") == expected


def test_a_slot_beyond_the_visible_devices_is_an_error() -> None:
    job = Job(("x",), NODES, devices=True)
    with refused(WorldError, "a", "slot 2", "CUDA_VISIBLE_DEVICES=3", "1 GPU"):
        job.variables(job.placements()[0], {"CUDA_VISIBLE_DEVICES": "3"})


def test_the_scripts_arguments_are_its_own_unless_local_rank_is_asked_for() -> None:
    job = Job(("python", "t.py"), NODES, ("--lr", "1"))
    assert job.argv(job.placements()[1]) == ["python", "t.py", "--lr", "1"]
    asked = Job(("python", "t.py"), NODES, ("--lr", "1"), local_rank_flag=True)
    assert asked.argv(asked.placements()[1]) == ["python", "t.py", "--local_rank=1", "--lr", "1"]


def test_a_job_reaches_another_host_unchanged() -> None:
    words = tuple(random.choice(["a b", "'", '"', "%n", "$HOME", "ü", "\\"]) for _ in range(6))
    jobs = [
        Job(words, NODES, words, environment={"X": "a=b c"}, cores=(1, 2), bind_cores=True, folder="/x y"),
        Job(("x",), NODES, once_per_node=True, spare=1, log_dir="logs"),
    ]
    for job in jobs:
        assert Job.from_json(job.to_json()) == job
        assert "\n" not in job.to_json()


# ---- cores


def test_cores_are_read_and_shared_out() -> None:
    assert parse_cores("1,3-5,7") == (1, 3, 4, 5, 7)
    shares = [cores_of(rank, 2, (1, 3, 4, 5, 7), tuple(range(8))) for rank in range(2)]
    assert shares == [(1, 3), (4, 5)]
    for text in ("3-1", "a", "1,0-2"):
        with refused(WorldError, "--bind_core_list", repr(text)):
            parse_cores(text)
    with refused(WorldError, "3 ranks", "2 cores", "--bind_cores_to_rank"):
        cores_of(0, 3, (0, 1), (0, 1))
    with refused(WorldError, "--bind_core_list", "core 9", "0-3"):
        cores_of(0, 1, (9,), (0, 1, 2, 3))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_bound_rank_runs_on_its_cores_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    core = random.choice(available_cores())
    text = (
        "import os, sys; open(sys.argv[1], 'w').write(f'{os.sched_getaffinity(0)} {os.environ[\"OMP_NUM_THREADS\"]}')"
    )
    out = str(tmp_path / "out")
    job = Job((sys.executable, "-c", text), (Node("localhost", (0,)),), (out,), bind_cores=True, cores=(core,))
    assert run_job(job, 0, stop_grace=None).code == 0
    assert (tmp_path / "out").read_text() == f"{{{core}}} 1"


# ---- environment


def test_known_prefixes_and_files_are_forwarded_and_nothing_else(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (home / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nONLY_HOME=a\n")
    (folder / ".plait_env").write_text("# comment\nexport MY_KEY='a b'\nNCCL_DEBUG=WARN\nONLY_HOME=b\n")
    present = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "p", "SECRET": "s", "PYTHONHOME": "h", "PATH": "/bin"}
    assert forwarded_variables(present, home=home, folder=folder) == {
        "NCCL_DEBUG": "WARN",
        "PYTHONPATH": "p",
        "NCCL_IB_DISABLE": "1",
        "MY_KEY": "a b",
        "ONLY_HOME": "b",
    }


def test_ds_env_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("A=1\n")
    (tmp_path / ".plait_env").write_text("B=1\n")
    for name in ("mine", str(tmp_path / "mine")):
        assert forwarded_variables({"DS_ENV_FILE": name}, home=tmp_path / "x", folder=tmp_path) == {"A": "1"}
    with refused(WorldError, "DS_ENV_FILE=absent", tmp_path):
        forwarded_variables({"DS_ENV_FILE": "absent"}, home=tmp_path, folder=tmp_path)


def test_a_wrong_line_of_an_env_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("A=1\nnonsense\n")
    with refused(WorldError, "e:2", "'nonsense'", "`NAME=value`"):
        read_env_file(tmp_path / "e")


# ---- ports and addresses


def test_a_port_in_use_is_told_with_its_holder() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", "import socket,sys\ns=socket.socket();s.bind(('127.0.0.1',0));s.listen()\n"
         "print(s.getsockname()[1],flush=True);sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    with refused(WorldError, f"--master_port {port}", f"process {holder.pid}"):
        check_port(port)
    holder.communicate()
    assert port_is_free(port)
    assert check_port(free_port()) > 0


def test_this_host_is_known_by_its_addresses() -> None:
    assert is_this_host("localhost")
    assert is_this_host("me@127.0.0.1")
    assert not is_this_host("203.0.113.1")  # reserved for documentation: nobody's
    assert not is_this_host("no-such-host.invalid")
    assert route_to("127.0.0.1") == interface_of("127.0.0.1") != None  # noqa: E711


# ---- exit codes


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, False), (0, False)], 0),
        ([(3, False), (7, False)], 7),
        ([(1, False), (-9, False), (-15, True)], 137),
        ([(0, False), (-15, True)], 143),
        ([(2, False), (-15, True)], 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst_cause(ends: list[tuple[int, bool]], expected: int) -> None:
    records = [RankRecord(place) for place in Job(("x",), (Node("a", tuple(range(len(ends)))),)).placements()]
    for record, (code, by_us) in zip(records, ends, strict=True):
        record_end(record, code, by_us=by_us)
    assert exit_code(records) == expected
    assert exit_code(records, hung=True) == 1


def test_each_rank_has_a_log_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import os,sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    job = Job((sys.executable, "-u", "-c", text), (Node("x", (0, 1)),), log_dir=str(tmp_path / "logs"), log_prefix="t_")
    assert run_job(job, 0, stop_grace=None).code == 0
    assert [(tmp_path / "logs" / f"t_rank{rank}.log").read_text() for rank in (0, 1)] == [
        "out 0\nerr\n",
        "out 1\nerr\n",
    ]
    assert capfd.readouterr().out == ""


def test_a_free_port_is_free_on_ipv6_too() -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", port))
