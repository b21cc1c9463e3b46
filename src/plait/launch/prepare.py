"""Makes a launch from flags: chooses its hosts, ranks and launcher, and shows or runs it."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from plait.config import read_lines, whole_number
from plait.errors import ConfigError, Problem, WorldError
from plait.launch import remote
from plait.launch.controller import Command, Controller, run_command
from plait.launch.elastic import elastic_job, is_elastic, range_of_nodes, restarts, uses_torchs_agent
from plait.launch.environment import check_address, with_variables
from plait.launch.heartbeat import FOLDER_VARIABLE
from plait.launch.hostfile import MOST_SLOTS, Pool, choose, limit, read_hostfile
from plait.launch.job import Job, Node, cpu_count, parse_cores
from plait.launch.local import gpu_count, run_job
from plait.launch.multi_host import run_multi_host
from plait.launch.network import DEFAULT_PORT, check_port, free_port, is_this_host, resolve, source_address
from plait.launch.options import DEFAULT_HOSTFILE, LaunchOptions, is_custom_launcher
from plait.launch.records import LaunchOutcome
from plait.launch.remote import FAMILIES, Ssh, node_words, pdsh_end, shell_line, split_launcher_args
from plait.launch.restart import GRACE_S, Membership, run_with_restarts
from plait.plugins import call, find


class Starter(Protocol):
    """The interface of a user's `--launcher`: a function, or a class without arguments whose objects are callable.

    The command that it returns runs on this host until the job has ended. It must start `host_words(job, N)` once on
    the N-th host of `job.nodes`, for every N; or `rank_words(job)` once per rank, with variables of MPI, PMI or Slurm.
    """

    def __call__(self, job: Job, arguments: Sequence[str], /) -> Command:
        """Return the command that starts a job. `arguments` are those of `--launcher_args`."""


STARTERS: Mapping[str, str] = MappingProxyType(
    {
        "pdsh": "plait.launch.remote:pdsh_command",
        "slurm": "plait.launch.remote:srun_command",
        "openmpi": "plait.launch.remote:openmpi_command",
        "mpich": "plait.launch.remote:mpich_command",
        "mvapich": "plait.launch.remote:mvapich_command",
        "impi": "plait.launch.remote:impi_command",
    }
)
"""Plait's launchers as `module:name`, loaded like a user's. `local` and `ssh` are not here: they need no command."""


def find_starter(name: str, **given: Any) -> Starter:
    """Return the launcher with a name, Plait's or the user's. `given` are further arguments for it."""
    key = "--launcher"
    target = find("launcher", STARTERS.get(name, name), key)
    starter = target() if isinstance(target, type) else target

    def start(job: Job, arguments: Sequence[str], /) -> Command:
        if name in STARTERS:
            made: Command = starter(job, arguments, **given)
            return made
        command = call(starter, key, job, arguments, name=name, arguments={}, **given)
        if not isinstance(command, Command):
            message = f"{name!r} returned a {type(command).__name__}"
            raise ConfigError(Problem(key, message, "Return a plait.launch.Command."))
        return command

    if not callable(starter):
        message = f"{name!r} is a {type(starter).__name__}, which cannot be called with a job"
        raise ConfigError(Problem(key, message, "Name a function (job, arguments) → plait.launch.Command."))
    return start


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A launch, with everything that can be decided before it starts."""

    options: LaunchOptions
    launcher: str
    job: Job
    node: int = 0
    """The number of this host, if the command is run by hand on each host."""
    argv: tuple[str, ...] = ()
    """The command line that the launch was made from."""

    @property
    def remote(self) -> bool:
        """Whether this process connects to other hosts itself. If so, they can be checked first."""
        return self.launcher in ("ssh", "pdsh", *FAMILIES) and not all_on_this_host(self.job.nodes, self.options)

    def reach(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on one of the hosts. On this host ssh is not used, unless forced."""
        host = self.job.nodes[node].host
        arguments, first = split_launcher_args(self.options.launcher_args if self.launcher == "ssh" else ())
        line = shell_line(argv, folder=self.job.folder, environment=self.job.environment, first=first)
        if not self.options.force_multi and is_this_host(host):
            return ["sh", "-c", line] if first else list(argv)
        return Ssh(self.options.ssh_port, arguments).command(host, line)

    def commands(self) -> list[Command]:
        """Return all commands of the launch."""
        job, options = self.final_job(), self.options
        if self.launcher == "local":
            variables = [(placement, job.variables(placement, os.environ)) for placement in job.started_on(self.node)]
            return [
                Command(tuple(job.argv(placement)), environment=environment) for placement, environment in variables
            ]
        if self.launcher == "ssh":
            reached = [self.reach(node, node_words(node)) for node in range(len(job.nodes))]
            return [Command(tuple(argv), stdin=job.to_json()) for argv in reached]
        if self.launcher == "slurm" and not remote.in_allocation():
            return [remote.sbatch_command(options, self.argv, job.environment)]
        return [self._starter()(job, options.launcher_args)]

    def _starter(self) -> Starter:
        """Return the launcher that makes the one command which starts all ranks or hosts."""
        further = {"ssh_port": self.options.ssh_port} if self.launcher == "pdsh" else {}
        return find_starter(self.launcher, **further)

    def final_job(self) -> Job:
        """Return the job as hosts get it. Call it when the address and the port are known."""
        return elastic_job(self.job, self.options) if uses_torchs_agent(self.options) else self.job

    def run(self) -> int:
        """Run the launch to its end; return the exit code of the worst rank."""
        stop_grace = self.options.stop_grace
        with _pid_file(self.options.save_pid):
            if is_elastic(self.options) and not uses_torchs_agent(self.options):
                return run_elastic(self)
            if self.launcher == "local":
                return run_job(self.final_job(), self.node, stop_grace=stop_grace).code
            if self.launcher == "ssh":
                argvs = [command.argv for command in self.commands()]
                return run_multi_host(self.final_job(), argvs, stop_grace=stop_grace).code
            if self.launcher == "slurm" and not remote.in_allocation():
                return run_command(self.commands()[0], stop_grace=stop_grace)  # only submits the job
            with Controller(self.job) as controller:
                connected = replace(self, job=controller.job)
                cleanup = []
                if self.launcher == "pdsh":
                    cleanup = [pdsh_end(self.job, self.options.launcher_args, ssh_port=self.options.ssh_port)]
                return run_command(
                    connected.commands()[0], stop_grace=stop_grace, afterwards=cleanup, controller=controller
                )


def run_elastic(setup: PreparedLaunch) -> int:
    """Run a job; restart it when ranks or hosts are lost or hosts come back. Return the last exit code."""
    options, stop_grace = setup.options, setup.options.stop_grace
    least, most = range_of_nodes(options, len(setup.job.nodes))
    index = {node.host: number for number, node in enumerate(setup.job.nodes)}
    membership = Membership(setup.job, least, most, lambda host, argv: setup.reach(index[host], argv))

    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        again = replace(setup, job=_rendezvous_of_attempt(setup, job))
        if setup.launcher == "local":
            return run_job(again.job, setup.node, stop_grace=stop_grace, grace=GRACE_S, join=join)
        commands = [command.argv for command in again.commands()]
        return run_multi_host(again.job, commands, stop_grace=stop_grace, grace=GRACE_S, join=join)

    return run_with_restarts(membership, once, restarts=restarts(options))


def _rendezvous_of_attempt(setup: PreparedLaunch, job: Job) -> Job:
    """Return the job with an address and a new port for this attempt, as the last port may still be in use."""
    if setup.launcher == "local":
        return job if setup.options.master_port is not None else replace(job, port=free_port())
    first, same = job.nodes[0].host, job.nodes[0].host == setup.job.nodes[0].host
    return job if same else replace(job, address=resolve(first))


@contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    """Write the launcher's pid into a file while it runs, for programs that start it.

    The file's name can be guessed, and every user can write to that folder. So a new file is created: a link that
    another user has put there is not followed.
    """
    if not wanted:
        yield
        return
    path = Path(f"/tmp/{os.getpid()}.ds")  # noqa: S108  # where DeepSpeed writes it
    try:
        path.unlink(missing_ok=True)  # left by an earlier process with this pid
        with path.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        remedy = "Remove another user's file there, or leave the flag out."
        raise ConfigError(Problem("--save_pid", message, remedy)) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def all_on_this_host(nodes: Sequence[Node], options: LaunchOptions) -> bool:
    """Return whether every host name means this host, and ssh is not forced."""
    return not options.force_multi and all(is_this_host(node.host) for node in nodes)


def code_folder(options: LaunchOptions) -> str | None:
    """Return the folder whose code hosts must share: the script's, or the current one for others."""
    if not options.script:
        return None
    from_current_folder = options.module or options.no_python
    return os.getcwd() if from_current_folder else str(Path(options.script).absolute().parent)


# Variables that are forwarded to other hosts: only those that are named here.


PREFIXES = ("NCCL_", "PYTHON", "TORCH_", "PYTORCH_", "GLOO_", "UCX_", "MV2_", "FI_", "OMP_", "MLFLOW", "PLAIT_")
"""Variables with these prefixes are forwarded."""

_NOT_FORWARDED = {"PYTHONHOME", "PYTHONSTARTUP", FOLDER_VARIABLE}
"""Variables that are not forwarded although they have a prefix: they describe this host or this process."""

ENV_FILES = (".deepspeed_env", ".plait_env")
"""Files with variables, read from the home folder, then from the current one; later values override earlier ones."""


def forwarded_variables(present: Mapping[str, str], *, home: Path, folder: Path) -> dict[str, str]:
    """Return the variables for every rank on every host: those with a known prefix, then those in `ENV_FILES`.

    If the variable `DS_ENV_FILE` is set, it is the name or path of the file to read instead.
    """
    variables = {
        name: value for name, value in present.items() if name.startswith(PREFIXES) and name not in _NOT_FORWARDED
    }
    names = (present["DS_ENV_FILE"],) if "DS_ENV_FILE" in present else ENV_FILES
    read = set()
    for name in names:
        for base in (home, folder):
            path = (base / name).absolute()  # if `name` is absolute, it is the path
            if path.is_file() and path not in read:
                read.add(path)
                variables |= read_env_file(path)
    if "DS_ENV_FILE" in present and not read:
        raise WorldError(f"DS_ENV_FILE={present['DS_ENV_FILE']}: no such file in {home} or {folder}")
    return variables


def forwarded_variables_here(present: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `forwarded_variables` for this process's environment, home and current folder."""
    return forwarded_variables(os.environ if present is None else present, home=Path.home(), folder=Path.cwd())


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables in a file of lines `NAME=value`, with optional `export`, quotes, and `#` comments."""
    variables = {}
    for number, line in enumerate(read_lines(path, WorldError), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            raise WorldError(f"{path}:{number}: cannot read {text!r}; write `NAME=value`")
        value = match[2]
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        variables[match[1]] = value[1:-1] if quoted else value
    return variables


def prepare_launch(options: LaunchOptions, argv: Sequence[str]) -> PreparedLaunch:
    """Return the launch that the flags ask for. No other host is asked."""
    options = with_variables(options)
    custom = is_custom_launcher(options.launcher)
    if is_elastic(options) and (custom or options.launcher in ("slurm", "pdsh", *FAMILIES)):
        raise WorldError(
            f"--launcher {options.launcher} starts a fixed number of ranks; elastic training goes with ssh"
        )
    if options.launcher == "slurm":
        return _on_slurm(options, argv)
    pool = _pool(options)
    if pool is None:
        return _without_hostfile(options, argv)
    nodes = _nodes(_chosen(pool, options))
    job = _job(options, nodes, devices=True)
    on_this_host = all_on_this_host(nodes, options)
    launcher = options.launcher or ("local" if on_this_host and len(nodes) == 1 else "ssh")
    if launcher in ("ssh", "pdsh") and on_this_host and len(nodes) == 1:
        launcher = "local"
    if launcher == "local" and not (on_this_host and len(nodes) == 1):
        raise WorldError(f"--launcher local starts ranks on this host only, not on {nodes[-1].host}; use ssh")
    if on_this_host:
        job = _rendezvous_on_host(job, options)
    else:
        job = replace(job, address=options.master_addr or _address(nodes), port=options.master_port or DEFAULT_PORT)
    if launcher != "local":
        job = replace(job, folder=os.getcwd(), environment=forwarded_variables_here())
    return PreparedLaunch(options, launcher, job, argv=tuple(argv))


def _pool(options: LaunchOptions) -> Pool | None:
    if options.hostfile is not None:
        return read_hostfile(Path(options.hostfile))
    if Path(DEFAULT_HOSTFILE).is_file():
        return read_hostfile(Path(DEFAULT_HOSTFILE))
    return {"localhost": tuple(range(_ranks_a_host(options) or gpu_count() or 1))} if options.force_multi else None


def _chosen(pool: Pool, options: LaunchOptions) -> Pool:
    if options.include or options.exclude:
        return choose(pool, include=options.include, exclude=options.exclude)
    hosts = options.num_nodes
    if hosts is None and options.nnodes is not None:
        hosts = min(range_of_nodes(options, len(pool))[1], len(pool))
    return limit(pool, hosts=hosts, slots=_ranks_a_host(options))


def _nodes(pool: Pool) -> tuple[Node, ...]:
    return tuple(Node(host, slots) for host, slots in pool.items())


def _ranks_a_host(options: LaunchOptions) -> int | None:
    """Return the number of ranks per host that the flags ask for; None if they name no number."""
    count = _count(options)
    if count is not None and count > MOST_SLOTS:
        raise WorldError(f"{count} ranks per host: at most {MOST_SLOTS} are possible; use a smaller number")
    return count


def _count(options: LaunchOptions) -> int | None:
    text = options.nproc_per_node
    if text is None:
        return options.num_gpus
    if count := whole_number(text):
        return count
    if text == "cpu":
        return cpu_count()
    if text not in ("gpu", "auto"):
        raise WorldError(f"--nproc_per_node {text!r} is not a number of ranks; use a number from 1, gpu, cpu or auto")
    count = gpu_count()
    if count == 0 and text == "gpu":
        raise WorldError("--nproc_per_node gpu: no GPU can be seen here; use a number, or cpu")
    return count or cpu_count()


def _without_hostfile(options: LaunchOptions, argv: Sequence[str]) -> PreparedLaunch:
    """Return a launch on this host alone, or on one of several, where the user runs the command on each (torchrun)."""
    custom = is_custom_launcher(options.launcher)
    if not custom and options.launcher not in (None, "local", *FAMILIES):
        raise WorldError(f"--launcher {options.launcher} needs hosts; name a file with --hostfile")
    slots = _local_slots(options)
    count = range_of_nodes(options, 1)[1] if options.nnodes else 1
    if options.num_nodes is not None and options.num_nodes > 1:
        raise WorldError(
            f"--num_nodes {options.num_nodes}: without a hostfile only this host is known; name one with --hostfile, "
            "or run the same command on each host with --nnodes, --node_rank and --master_addr"
        )
    devices = options.num_gpus is not None or bool(options.include or options.exclude)
    node = options.node_rank or 0
    if count == 1:
        job = _job(options, (Node("localhost", slots),), devices=devices)
        return PreparedLaunch(options, options.launcher or "local", _rendezvous_on_host(job, options), argv=tuple(argv))
    if is_elastic(options):
        if options.rdzv_endpoint is None:
            raise WorldError(f"--nnodes {options.nnodes}: hosts need a place to meet; name it with --rdzv_endpoint")
        job = _job(options, (Node("localhost", slots),), devices=devices)
        return PreparedLaunch(options, "local", job, argv=tuple(argv))
    if options.node_rank is None or options.master_addr is None or not 0 <= node < count:
        raise WorldError(
            f"--nnodes {count} without a hostfile: every host is started by hand, and needs --master_addr, the address "
            f"of the first, and --node_rank, 0 to {count - 1}"
        )
    port = options.master_port or DEFAULT_PORT
    if node == 0:
        check_port(port, asked_by=options.master_port_by)
    job = _job(options, tuple(Node(f"node-{index}", slots) for index in range(count)), devices=devices)
    return PreparedLaunch(options, "local", replace(job, address=options.master_addr, port=port), node, tuple(argv))


def _local_slots(options: LaunchOptions) -> tuple[int, ...]:
    count = _ranks_a_host(options)
    if count is None:
        count = max(gpu_count(), 1)
    pool = choose({"localhost": tuple(range(count))}, include=options.include, exclude=options.exclude)
    return pool["localhost"]


def _on_slurm(options: LaunchOptions, argv: Sequence[str]) -> PreparedLaunch:
    if options.hostfile is not None:
        raise WorldError(f"--hostfile {options.hostfile}: with Slurm, hosts come from Slurm; leave it out")
    if not remote.in_allocation():
        job = _job(options, (Node("localhost", (0,)),), devices=False)
        return PreparedLaunch(options, "slurm", replace(job, environment=forwarded_variables_here()), argv=tuple(argv))
    pool = remote.allocation(_ranks_a_host(options))
    nodes = _nodes(choose(pool, include=options.include, exclude=options.exclude))
    job = _job(options, nodes[: options.num_nodes], devices=False)
    address, port = options.master_addr or nodes[0].host, options.master_port or remote.job_port()
    job = replace(job, address=address, port=port, environment=forwarded_variables_here())
    return PreparedLaunch(options, "slurm", job, argv=tuple(argv))


def _rendezvous_on_host(job: Job, options: LaunchOptions) -> Job:
    """Return the job with an address and a port for ranks of one host."""
    check_address(options.master_addr)
    fixed = options.master_port
    port = free_port() if fixed is None else check_port(fixed, asked_by=options.master_port_by)
    return replace(job, address=options.master_addr or "127.0.0.1", port=port)


def _address(nodes: Sequence[Node]) -> str:
    """Return the address of the first host, as the others see it; empty if the host itself must be asked."""
    first = nodes[0].host
    try:
        if not is_this_host(first):
            return resolve(first)
        others = [resolve(node.host) for node in nodes[1:] if not is_this_host(node.host)]
        return source_address(others[0]) if others else resolve(first)
    except (WorldError, OSError):
        return ""  # only ssh's configuration has this name


def _job(options: LaunchOptions, nodes: tuple[Node, ...], *, devices: bool) -> Job:
    if options.no_python:
        program: tuple[str, ...] = (options.script,)
    else:
        program = (sys.executable, "-u", *(("-m",) if options.module else ()), options.script)
    return Job(
        program,
        nodes,
        options.arguments,
        id=uuid.uuid4().hex[:8],
        devices=devices,
        local_rank_flag=options.pass_local_rank,
        bind_cores=options.bind_cores_to_rank,
        cores=parse_cores(options.bind_core_list) if options.bind_core_list else (),
        log_dir=options.enable_each_rank_log,
        log_prefix=time.strftime("%Y%m%d%H%M%S_"),
    )
