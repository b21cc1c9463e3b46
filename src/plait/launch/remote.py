"""Commands that start ranks on other hosts: by ssh, pdsh, mpirun or Slurm."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch.controller import Command
from plait.launch.hostfile import Pool
from plait.launch.job import Job
from plait.launch.options import LaunchOptions, without
from plait.launch.rank import rank_words

OPTIONS = (
    ("BatchMode", "yes"),  # fail instead of showing a prompt, which no user would see
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "3"),  # an unplugged host is noticed after 15 seconds
)


@dataclass(frozen=True, slots=True)
class Ssh:
    """Runs commands on a host over ssh."""

    port: int | None = None
    arguments: tuple[str, ...] = ()
    """Options of ssh from `--launcher_args`. They come first, as ssh uses the first value of an option."""

    def command(self, host: str, remote: str) -> list[str]:
        """Return the ssh command that runs a line of shell on `host`."""
        options = [argument for name, value in OPTIONS for argument in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port is not None else []
        return ["ssh", *self.arguments, *options, *port, "-T", host, remote]


def split_launcher_args(arguments: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the options in `--launcher_args` for ssh or pdsh, and the command to run first (`source env.sh`)."""
    begins = next((at for at, argument in enumerate(arguments) if argument in ("source", ".")), len(arguments))
    if arguments and not arguments[0].startswith("-"):
        begins = 0
    first = list(arguments[begins:])
    if first[:1] == ["source"]:
        first[0] = "."  # every shell has `.`, but it searches PATH for a bare name
    if first[:1] == ["."] and len(first) > 1 and "/" not in first[1]:
        first[1] = f"./{first[1]}"
    return tuple(arguments[:begins]), shlex.join(first)


def shell_line(argv: Sequence[str], *, folder: str | None, environment: Mapping[str, str], first: str = "") -> str:
    """Return a shell line that runs a command in a folder, after the command `first`, with variables set."""
    start = f"cd {shlex.quote(folder)} && " if folder else ""
    start += f"{first} && " if first else ""
    # Only variables that Python needs to start. The others are sent with the job, so they are not visible in `ps`.
    variables = [f"{name}={value}" for name, value in environment.items() if name.startswith("PYTHON")]
    return start + shlex.join(["exec", *(["env", *variables] if variables else []), *argv])


def node_words(node: int) -> list[str]:
    """Return the command of the agent on a host."""
    return [sys.executable, "-m", "plait.launch.agent", "--node", str(node)]


# pdsh. It passes no stdin, so the job is on its command line.


def pdsh_command(job: Job, arguments: Sequence[str], *, ssh_port: int | None) -> Command:
    """Return the pdsh command of a job: one line for all hosts, in which pdsh replaces `%n` by the host's number."""
    argv = [sys.executable, "-m", "plait.launch.agent", "--job", job.to_json().replace("%", "%%"), "--node", "%n"]
    return _command(job, arguments, argv, ssh_port)


def pdsh_end(job: Job, arguments: Sequence[str], *, ssh_port: int | None) -> Command:
    """Return the pdsh command that ends ranks of the job that still run after its first command has ended."""
    return _command(job, arguments, [sys.executable, "-m", "plait.launch.agent", "--end", job.id], ssh_port)


def _command(job: Job, arguments: Sequence[str], argv: Sequence[str], ssh_port: int | None) -> Command:
    options, first = split_launcher_args(arguments)
    remote = shell_line(argv, folder=job.folder, environment=job.environment, first=first)
    hosts = ",".join(node.host for node in job.nodes)
    start = ("pdsh", "-S", "-R", "ssh", "-f", str(max(len(job.nodes), 32)), "-w", hosts)
    return Command((*start, *options, remote), environment=_environment(ssh_port))


def _environment(ssh_port: int | None) -> dict[str, str]:
    options = ["-o", "BatchMode=yes", *(["-p", str(ssh_port)] if ssh_port is not None else [])]
    present = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    return {"PDSH_SSH_ARGS_APPEND": f"{present} {shlex.join(options)}".strip()}


# mpirun: OpenMPI's, and those of the MPICH family.


FAMILIES = ("openmpi", "mpich", "mvapich", "impi")


def mpi_command(family: str, job: Job, arguments: Sequence[str]) -> Command:
    """Return the mpirun command of a job. Its hosts and slots are in a file of this run."""
    hosts = str(Path(tempfile.gettempdir(), f"plait-{job.id}.hosts"))
    rank = rank_words(job)
    if family == "openmpi":
        lines = [f"{node.host} slots={len(node.slots)}" for node in job.nodes]
        # Only Plait may bind ranks to cores: mpirun would bind all threads of a rank to one core.
        start = ["mpirun", "-n", str(job.size), "--hostfile", hosts, "--map-by", "slot", "--bind-to", "none"]
        exports = [option for name in job.environment for option in ("-x", name)]
    else:
        lines = [f"{node.host}:{len(node.slots)}" for node in job.nodes]
        start = ["mpirun" if family == "impi" else "mpiexec.hydra", "-n", str(job.size), "-f", hosts]
        exports = ["-genvlist", ",".join(job.environment)] if job.environment else []
        if family == "impi":
            exports += ["-genv", "I_MPI_PIN", "0"]
        if family == "mvapich":
            exports += ["-genv", "MV2_SMP_USE_CMA", "0", "-genv", "MV2_ENABLE_AFFINITY", "0"]
    argv = (*start, *exports, *arguments, *rank)
    return Command(argv, environment=job.environment, files={hosts: "\n".join(lines) + "\n"})


openmpi_command = partial(mpi_command, "openmpi")
mpich_command = partial(mpi_command, "mpich")
mvapich_command = partial(mpi_command, "mvapich")
impi_command = partial(mpi_command, "impi")

# Slurm: `srun` inside an allocation; outside of one, a batch file that runs the same launch in an allocation.


def in_allocation() -> bool:
    """Whether this process runs in a Slurm allocation."""
    return "SLURM_JOB_ID" in os.environ


def allocation(slots: int | None) -> Pool:
    """Return the hosts of the allocation. Slots per host: `slots`, else its tasks, else its GPUs, else 1."""
    node_list = os.environ.get("SLURM_JOB_NODELIST", "")
    listed = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout.split():
        raise WorldError(
            f"scontrol cannot read the node list {node_list!r} of this allocation: {listed.stderr.strip()}"
        )
    count = slots or _first_number("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE") or 1
    return {host: tuple(range(count)) for host in listed.stdout.split()}


def job_port() -> int:
    """Return a port derived from the Slurm job's number. It cannot be checked here if it is free for rank 0."""
    digits = re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", ""))
    return 20000 + int(digits or "0") % 10000


def srun_command(job: Job, arguments: Sequence[str]) -> Command:
    """Return the srun command of a job in its allocation. Slurm binds devices and cores, and forwards all variables."""
    counts = [len(node.slots) for node in job.nodes]
    if len(set(counts)) > 1:
        raise _uneven(job)
    hosts = ",".join(node.host for node in job.nodes)
    ranks = (f"--nodes={len(counts)}", f"--ntasks={job.size}", f"--ntasks-per-node={counts[0]}")
    start = ("srun", *ranks, f"--nodelist={hosts}")
    # A failed rank ends all of them, and srun returns the worst exit code.
    return Command(
        (*start, "--kill-on-bad-exit=1", "--export=ALL", *arguments, *rank_words(job)), environment=job.environment
    )


def _uneven(job: Job) -> WorldError:
    return WorldError(
        "srun gives equally many ranks to each host, but the filter leaves "
        + ", ".join(f"{node.host} with {len(node.slots)}" for node in job.nodes)
        + "; choose as many slots on each, or use --launcher ssh inside the allocation"
    )


def batch_file(options: LaunchOptions, argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the text of a batch file that requests hosts and runs the same `plait launch` on the first of them."""
    per_node = options.num_gpus or _plain(options.nproc_per_node) or 1
    nodes = options.num_nodes or _plain(options.nnodes) or 1
    name = Path(options.script).stem or "plait"
    asked = {"job-name": name, "nodes": nodes, "ntasks-per-node": per_node, "output": f"{name}-%j.out"}
    if options.num_gpus is not None:
        asked["gpus-per-node"] = options.num_gpus
    if options.include:
        asked["nodelist"] = _hosts(options.include, "--include")
    if options.exclude:
        asked["exclude"] = _hosts(options.exclude, "--exclude")
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items())]
    if options.launcher_args:
        lines.append(f"#SBATCH {shlex.join(options.launcher_args)}")
    lines += ["", f"cd {shlex.quote(str(Path.cwd()))} || exit 1"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    again = without(argv, "launcher_args", "dry_run")  # here `launcher_args` are for sbatch
    lines += [f"exec {shlex.join([sys.executable, '-m', 'plait', 'launch', *again])}"]
    return "\n".join(lines) + "\n"


def sbatch_command(options: LaunchOptions, argv: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Return the command that writes the batch file into the current folder and submits it."""
    path = f"{Path(options.script).stem or 'plait'}.sbatch"
    return Command(("sbatch", path), files={path: batch_file(options, argv, environment)}, keep_files=True)


def _hosts(text: str, flag: str) -> str:
    if ":" in text:
        raise WorldError(f"{flag} {text!r}: Slurm allocates whole hosts before their slots are known; name hosts only")
    return ",".join(text.split("@"))


def _plain(text: str | None) -> int | None:
    return None if text is None else whole_number(text)


def _first_number(*names: str) -> int | None:
    for name in names:
        if (match := re.search(r"\d+", os.environ.get(name, ""))) and int(match.group()):
            return int(match.group())
    return None
