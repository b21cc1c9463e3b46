"""A real Slurm of one host, for as long as it is needed: munged, slurmctld and slurmd in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")

CONF = """
ClusterName=plait
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None where one can be tried."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"{absent[0]} is not installed" if absent else None


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Variables with which `srun` and `sbatch` reach it. Raises RuntimeError, with its logs, if it does not come up."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = {name: str(_port()) for name in ("controller", "daemon")}
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, **ports))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    commands = [
        ["munged", "-F", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", host],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}.out").open("wb")
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(0.5)
        _wait_until_up(environment, folder)
        yield {"SLURM_CONF": environment["SLURM_CONF"], "PATH": PATH}
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            process.kill()


def _wait_until_up(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=30)
        if said.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    logs = [f"{path.name}: {path.read_text(errors='replace')[-400:]}" for path in folder.glob("*.out")]
    raise RuntimeError("Slurm does not come up: " + "\n".join([said.stdout, said.stderr, *logs]))


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
