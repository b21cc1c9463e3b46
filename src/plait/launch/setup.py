"""A launch that is ready to go: what it runs, shown or done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from plait.errors import ConfigError, Problem
from plait.launch import remote
from plait.launch.controller import Command, Controller, run_command
from plait.launch.elastic import elastic_job, is_elastic, range_of_nodes, restarts, uses_torchs_agent
from plait.launch.fleet import run_fleet
from plait.launch.job import Job, Node
from plait.launch.local import run_job
from plait.launch.membership import GRACE_S, Membership, run_again_and_again
from plait.launch.network import free_port, is_this_host, resolve
from plait.launch.options import LaunchOptions
from plait.launch.records import LaunchOutcome
from plait.launch.remote import FAMILIES, Ssh, node_words, options_and_first, pdsh_end, shell_line
from plait.plugins import call, find


class Starter(Protocol):
    """What `--launcher` may name: a function, or a class without arguments that is called like one.

    The command runs here until the job has ended. It starts `host_words(job, N)` once on each host, the N-th of
    `job.nodes`; or `rank_words(job)` once for each rank, under MPI's, PMI's or Slurm's variables.
    """

    def __call__(self, job: Job, arguments: Sequence[str], /) -> Command:
        """The command that starts a job. `arguments` are those of `--launcher_args`."""


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
"""Plait's own launchers by their words; they come in as those of users do. `local` and `ssh` start ranks themselves."""


def find_starter(name: str, **given: Any) -> Starter:
    """A launcher of Plait's or of the user's own. `given` is what it is told besides."""
    key = "--launcher"
    found = find("launcher", STARTERS.get(name, name), key)
    starter = found() if isinstance(found, type) else found

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
class Setup:
    """A launch that is ready to go."""

    options: LaunchOptions
    launcher: str
    job: Job
    node: int = 0
    """Which of the hosts this one is, where each is started by hand."""
    words: tuple[str, ...] = ()
    """The command line that it was made from."""

    @property
    def remote(self) -> bool:
        """Whether this launcher goes onto other hosts itself, so that they can be looked at first."""
        return self.launcher in ("ssh", "pdsh", *FAMILIES) and not all_here(self.job.nodes, self.options)

    def reach(self, node: int, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on one of the hosts. This host needs no ssh, unless it is forced."""
        host = self.job.nodes[node].host
        arguments, first = options_and_first(self.options.launcher_args if self.launcher == "ssh" else ())
        line = shell_line(words, folder=self.job.folder, environment=self.job.environment, first=first)
        if not self.options.force_multi and is_this_host(host):
            return ["sh", "-c", line] if first else list(words)
        return Ssh(self.options.ssh_port, arguments).command(host, line)

    def commands(self) -> list[Command]:
        """All that is run, in the launcher's words."""
        job, options = self.final_job(), self.options
        if self.launcher == "local":
            variables = [(place, job.variables(place, os.environ)) for place in job.started_on(self.node)]
            return [Command(tuple(job.argv(place)), environment=found) for place, found in variables]
        if self.launcher == "ssh":
            reached = [self.reach(node, node_words(node)) for node in range(len(job.nodes))]
            return [Command(tuple(argv), stdin=job.to_json()) for argv in reached]
        if self.launcher == "slurm" and not remote.in_allocation():
            return [remote.sbatch_command(options, self.words, job.environment)]
        return [self._starter()(job, options.launcher_args)]

    def _starter(self) -> Starter:
        """What makes the one command that starts all ranks or hosts."""
        told = {"ssh_port": self.options.ssh_port} if self.launcher == "pdsh" else {}
        return find_starter(self.launcher, **told)

    def final_job(self) -> Job:
        """The job as hosts get it; made last, when the address and the port are known."""
        return elastic_job(self.job, self.options) if uses_torchs_agent(self.options) else self.job

    def run(self) -> int:
        """Run it to its end; returns the exit code of the worst rank."""
        patience = self.options.stop_grace
        with _pid_note(self.options.save_pid):
            if is_elastic(self.options) and not uses_torchs_agent(self.options):
                return run_elastic(self)
            if self.launcher == "local":
                return run_job(self.final_job(), self.node, patience=patience).code
            if self.launcher == "ssh":
                argvs = [command.argv for command in self.commands()]
                return run_fleet(self.final_job(), argvs, patience=patience).code
            if self.launcher == "slurm" and not remote.in_allocation():
                return run_command(self.commands()[0], patience=patience)  # submits, and is done
            with Controller(self.job) as desk:
                told = replace(self, job=desk.job)
                ends = []
                if self.launcher == "pdsh":
                    ends = [pdsh_end(self.job, self.options.launcher_args, ssh_port=self.options.ssh_port)]
                return run_command(told.commands()[0], patience=patience, afterwards=ends, desk=desk)


def run_elastic(setup: Setup) -> int:
    """Run a job that goes on when ranks or hosts are lost, or come back; returns its last exit code."""
    options, patience = setup.options, setup.options.stop_grace
    least, most = range_of_nodes(options, len(setup.job.nodes))
    index = {node.host: number for number, node in enumerate(setup.job.nodes)}
    crew = Membership(setup.job, least, most, lambda host, words: setup.reach(index[host], words))

    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        again = replace(setup, job=_meeting_place(setup, job))
        if setup.launcher == "local":
            return run_job(again.job, setup.node, patience=patience, grace=GRACE_S, join=join)
        commands = [command.argv for command in again.commands()]
        return run_fleet(again.job, commands, patience=patience, grace=GRACE_S, join=join)

    return run_again_and_again(crew, once, restarts=restarts(options))


def _meeting_place(setup: Setup, job: Job) -> Job:
    """The job with an address and a port for this attempt: the port of the last one may still be held."""
    if setup.launcher == "local":
        return job if setup.options.master_port is not None else replace(job, port=free_port())
    first, same = job.nodes[0].host, job.nodes[0].host == setup.job.nodes[0].host
    return job if same else replace(job, address=resolve(first))


@contextmanager
def _pid_note(wanted: bool) -> Iterator[None]:
    """The launcher's pid in a file, while it runs, for programs that start it.

    The name is known before, and every user may write into that folder: what lies there may be somebody's link to a
    file of ours, and is never written through.
    """
    if not wanted:
        yield
        return
    path = Path(f"/tmp/{os.getpid()}.ds")  # noqa: S108  # where DeepSpeed leaves it
    try:
        path.unlink(missing_ok=True)  # of a process that had this number before
        with path.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        remedy = "Remove what another user has left there, or leave the flag out."
        raise ConfigError(Problem("--save_pid", message, remedy)) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def all_here(nodes: Sequence[Node], options: LaunchOptions) -> bool:
    """Whether every host is this one, and ssh is not asked for all the same."""
    return not options.force_multi and all(is_this_host(node.host) for node in nodes)


def code_folder(options: LaunchOptions) -> str | None:
    """The folder whose code hosts must share: the script's, or for a module or another program the current one."""
    if not options.script:
        return None
    here = options.module or options.no_python
    return os.getcwd() if here else str(Path(options.script).absolute().parent)
