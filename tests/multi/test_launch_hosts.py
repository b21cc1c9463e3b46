"""`plait launch` over several hosts: real sshd, real networks between them, real gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.multi import hosts as rig
from tests.multi.hosts import Hosts
from tests.refusals import missing

pytestmark = pytest.mark.real("sshd")
PLAIT = [sys.executable, "-m", "plait", "launch"]

SUM = """
import json, os, pathlib, sys
import torch
from torch import distributed
distributed.init_process_group("gloo")
rank = distributed.get_rank()
total = torch.tensor([float(rank + 1)])
distributed.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "MINE", "YOURS", "SECRET")
about = {name: os.environ.get(name) for name in names}
about |= {"total": total.item(), "argv": sys.argv[2:], "at": os.popen("ip -o -4 addr show eth0").read().split()[3]}
pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps(about))
distributed.destroy_process_group()
"""
SLEEP = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(float(sys.argv[2]))
sys.exit(int(os.environ["RANK"]) * 3)
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with rig.hosts(3, tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for name, text in (("sum.py", SUM), ("sleep.py", SLEEP)):
        (tmp_path / name).write_text(text)
    (tmp_path / "out").mkdir()
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """Without what a launcher may have left."""
    marks = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "CUDA_VISIBLE")
    return {k: v for k, v in os.environ.items() if not k.startswith(marks)} | {"OMP_NUM_THREADS": "1", **more}


def run(work: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*PLAIT, *words]
    return subprocess.run(command, cwd=work, env=env or environment(), capture_output=True, text=True, timeout=200)


def start(work: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*PLAIT, *words], cwd=work, env=env or environment(), stdout=pipe, stderr=pipe, text=True)


def pids(work: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 90
    while True:
        texts = [path.read_text() for path in (work / "out").iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def gone(found: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ---- ranks find each other


@pytest.mark.parametrize(
    ("flags", "where", "devices"),
    [
        ([], [0, 0, 1, 2], ["0,1", "0,1", "0", "0"]),
        (["--include", "{0}:1@{2}"], [0, 2], ["1", "0"]),
    ],
)
def test_ranks_on_several_hosts_sum_over_gloo(
    three: Hosts, work: Path, flags: list[str], where: list[int], devices: list[str]
) -> None:
    (work / ".plait_env").write_text("MINE=from the file\n")
    (work / "setup_env.sh").write_text("export YOURS=from_the_script\n")
    flags = [flag.format(*three.addresses) for flag in flags]
    name, options = three.ssh()
    words = ["-H", three.hostfile(2, 1, 1), name, f"{options} source {work}/setup_env.sh", *flags]
    done = run(work, *words, "sum.py", "out", "--lr", "a b", env=environment(SECRET="stays"))
    assert done.returncode == 0, done.stderr
    size = len(where)
    for rank in range(size):
        about = json.loads((work / "out" / str(rank)).read_text())
        assert about["total"] == size * (size + 1) / 2
        assert about["at"] == f"{three.addresses[where[rank]]}/24"
        assert about["CUDA_VISIBLE_DEVICES"] == devices[rank]
        assert about["argv"] == ["--lr", "a b"]
        assert (about["MINE"], about["WORLD_SIZE"]) == ("from the file", str(size))
        assert about["YOURS"] == "from_the_script"
        if where[rank] > 0:
            assert about["SECRET"] is None  # only what is meant to go along does


def test_exclude_and_names_of_sshs_own(three: Hosts, work: Path) -> None:
    hostfile = three.hostfile(1, 2, names=["worker-1", "worker-0"])
    done = run(work, "-H", hostfile, *three.ssh(), "-e", "worker-0:0", "sum.py", "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((work / "out" / "1").read_text())["CUDA_VISIBLE_DEVICES"] == "1"
    assert not missing(done.stderr, "rank 0", three.addresses[1])


def test_hosts_may_have_ipv6_addresses(three: Hosts, work: Path) -> None:
    names = three.addresses6[:2]
    hostfile = three.hostfile(1, 1, names=[names[0], f"[{names[1]}]"])
    done = run(work, "-H", hostfile, *three.ssh(), "-i", f"{names[0]}@[{names[1]}]:0", "sum.py", "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((work / "out" / "1").read_text())["total"] == 3.0


@pytest.mark.real("pdsh")
def test_pdsh_starts_them_too(three: Hosts, work: Path) -> None:
    env = environment(PDSH_SSH_ARGS_APPEND=f"-F {three.config}")
    words = ["--launcher", "pdsh", "--no_ssh_check", "-H", three.hostfile(1, 1, 1), "--num_nodes", "2"]
    done = run(work, *words, "sum.py", "out", "50%", env=env)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        about = json.loads((work / "out" / str(rank)).read_text())
        assert (about["total"], about["argv"]) == (3.0, ["50%"])


@pytest.mark.real("mpirun.openmpi")
def test_openmpi_starts_them_too(three: Hosts, work: Path) -> None:
    arguments = f"--allow-run-as-root --mca plm_rsh_args '-F {three.config}'"
    words = ["--launcher", "openmpi", "--no_ssh_check", "-H", three.hostfile(2, 1, 1), "--launcher_args", arguments]
    done = run(work, *words, "sum.py", "out", "--x")
    assert done.returncode == 0, done.stderr
    found = [json.loads((work / "out" / str(rank)).read_text()) for rank in range(4)]
    assert [about["total"] for about in found] == [10.0] * 4
    assert [about["LOCAL_RANK"] for about in found] == ["0", "1", "0", "0"]


def test_torchs_elastic_agents_meet_on_the_first_host(three: Hosts, work: Path) -> None:
    words = ["--elastic_training", "--min_elastic_nodes", "2", "--num_nodes", "2", "--rdzv_conf", "timeout=60"]
    done = run(work, "-H", three.hostfile(1, 1, 1), *three.ssh(), *words, "sum.py", "out", "--x")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        about = json.loads((work / "out" / str(rank)).read_text())
        assert (about["total"], about["argv"]) == (3.0, ["--x"])


def test_a_program_beside_this_python_is_found_where_no_path_leads_to_it(three: Hosts, work: Path) -> None:
    for check in ([], ["--no_ssh_check"]):  # with a look at the hosts, and without
        words = [*check, "-H", three.hostfile(1, 1, 1), "--num_nodes", "2", *three.ssh(), "--no_python"]
        done = run(work, *words, "plait", "train", "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("plait train") == 2


def test_a_program_that_is_not_there_is_named_and_not_the_network(three: Hosts, work: Path) -> None:
    words = ["-H", three.hostfile(1, 1, 1), "--num_nodes", "2", *three.ssh(), "--no_python", "no-such-program", "x"]
    done = run(work, *words)
    assert done.returncode == 2
    for address in three.addresses[:2]:
        assert any(not missing(line, address, "'no-such-program'") for line in done.stderr.splitlines())
    done = run(work, "--no_ssh_check", *words)
    assert done.returncode == 2
    assert "'no-such-program'" in done.stderr
    assert "lost" not in done.stderr
    assert "network" not in done.stderr


# ---- how it ends


def test_the_worst_exit_code_comes_back(three: Hosts, work: Path) -> None:
    done = run(work, "-H", three.hostfile(1, 1, 1), *three.ssh(), "sleep.py", "out", "0.1")
    assert done.returncode in (3, 6)  # rank 1 or 2 was first; rank 0 ends with 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_launcher_ends_no_rank_stays(three: Hosts, work: Path, number: int) -> None:
    process = start(work, "--no_ssh_check", "-H", three.hostfile(2, 1, 1), *three.ssh(), "sleep.py", "out", "600")
    found = pids(work, 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0, errors
    assert gone(found)


@pytest.mark.real("pdsh")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nor_where_pdsh_started_them(three: Hosts, work: Path, number: int) -> None:
    env = environment(PDSH_SSH_ARGS_APPEND=f"-F {three.config}")
    words = ["--launcher", "pdsh", "--no_ssh_check", "-H", three.hostfile(1, 1, 1), "sleep.py", "out", "600"]
    process = start(work, *words, env=env)
    found = pids(work, 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0, errors
    assert gone(found)


def test_a_host_that_is_unplugged_is_named(three: Hosts, work: Path) -> None:
    quick = f"-F {three.config} -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    words = ["--no_ssh_check", "-H", three.hostfile(1, 1, 1), "--launcher_args", quick, "sleep.py", "out", "600"]
    process = start(work, *words)
    found = pids(work, 3)
    try:
        three.unplug(1)
        _, errors = process.communicate(timeout=90)
    finally:
        three.plug_in(1)
        for pid in found:  # the hand on the unplugged host would end its rank a minute later
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 255
    assert f"rank 1 on {three.addresses[1]}" in errors
    assert gone(found)


# ---- preflight


def test_the_table_names_what_is_wrong_before_anything_starts(three: Hosts, work: Path) -> None:
    refused = three.addresses[0].rpartition(".")[0] + ".254"  # this side of the bridge, where no sshd listens
    names = [three.addresses[0], refused]
    done = run(work, "-H", three.hostfile(1, 1, names=names), "--force_multi", *three.ssh(), "sleep.py", "out", "0")
    assert done.returncode == 2
    assert f"error: {refused}: ssh: connect to host {refused} port 22: Connection refused" in done.stderr
    assert not missing(done.stderr, "sshd", "--ssh_port")
    assert list((work / "out").iterdir()) == []


def test_different_code_is_an_error_that_names_the_host(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for host in range(2):
        (tmp_path / f"disk{host}").mkdir()
        (tmp_path / f"disk{host}" / "t.py").write_text(f"print({host})\n")
    with rig.hosts(2, tmp_path / "rig", disk=(tmp_path / "disk{}", work)) as two:
        done = run(work, "--preflight", "-H", two.hostfile(1, 1), *two.ssh(), "t.py")
        assert done.returncode == 1
        assert any(not missing(line, two.addresses[1], "code") for line in done.stderr.splitlines())
        assert "rsync" in done.stderr
        assert "its own" in done.stderr  # the folder is not shared
        (tmp_path / "disk1" / "t.py").write_text("print(0)\n")
        assert run(work, "--preflight", "-H", two.hostfile(1, 1), *two.ssh(), "t.py").returncode == 0


RUN = """
model: {type: gpt, vocab_size: 300, dim: 16, layers: 2, heads: 2, seq_len: 16}
data: {type: text, path: stdlib, limit_mb: 0.1, vocab_size: 300, seq_len: 16}
batch: {total: 4}
train: {max_steps: 4}
device: cpu
plan: "off"
"""


def test_hosts_without_a_shared_folder_are_refused_before_the_first_step(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for host in range(2):
        (tmp_path / f"disk{host}").mkdir()
        (tmp_path / f"disk{host}" / "run.yaml").write_text(RUN)
    with rig.hosts(2, tmp_path / "rig", disk=(tmp_path / "disk{}", work)) as two:
        words = ["-H", two.hostfile(1, 1), *two.ssh(), "--no_python", "plait", "train", "run.yaml", "work_dir=run"]
        done = run(work, *words)
        assert done.returncode != 0
        assert not missing(done.stderr, "checkpoint.node_local: true")
        assert "Iter(train)" not in done.stdout
        done = run(work, *words, "work_dir=local", "checkpoint.node_local=true", "log.every=1")
        assert done.returncode == 0, done.stderr
        assert "Iter(train) [4/4]" in done.stdout
        for host in range(2):
            assert (tmp_path / f"disk{host}" / "local" / "checkpoints" / "latest").is_symlink()


def test_a_port_in_use_is_replaced_or_its_holder_named(three: Hosts, work: Path) -> None:
    listen = "import socket,time; s=socket.create_server(('0.0.0.0', 29500)); print('up', flush=True); time.sleep(600)"
    inside = ["ip", "netns", "exec", three.names[0], sys.executable, "-c", listen]
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        words = ["-H", three.hostfile(1, 1, 1), "--num_nodes", "2", *three.ssh()]
        fixed = run(work, *words, "--master_port", "29500", "sum.py", "out")
        free = run(work, *words, "sum.py", "out")
        holder.kill()
    assert fixed.returncode == 2
    assert not missing(fixed.stderr, "--master_port 29500", f"process {holder.pid} ")
    assert free.returncode == 0, free.stderr
