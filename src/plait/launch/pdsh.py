"""Hosts reached by pdsh, for those who have it set up. It passes nothing in, so the job goes on its command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from plait.launch.command import Command
from plait.launch.job import Job
from plait.launch.ssh import options_and_first, shell_line


def pdsh_command(job: Job, arguments: Sequence[str], *, ssh_port: int | None) -> Command:
    """The pdsh of a job: the same line on every host, which finds its number by the name pdsh calls it by."""
    words = [sys.executable, "-m", "plait.launch.node", "--job", job.to_json().replace("%", "%%"), "--node", "%n"]
    return _command(job, arguments, words, ssh_port)


def pdsh_end(job: Job, arguments: Sequence[str], *, ssh_port: int | None) -> Command:
    """What ends the ranks that a pdsh has left."""
    return _command(job, arguments, [sys.executable, "-m", "plait.launch.node", "--end", job.id], ssh_port)


def _command(job: Job, arguments: Sequence[str], words: Sequence[str], ssh_port: int | None) -> Command:
    options, first = options_and_first(arguments)
    remote = shell_line(words, folder=job.folder, environment=job.environment, first=first)
    hosts = ",".join(node.host for node in job.nodes)
    start = ("pdsh", "-S", "-R", "ssh", "-f", str(max(len(job.nodes), 32)), "-w", hosts)
    return Command((*start, *options, remote), environment=_environment(ssh_port))


def _environment(ssh_port: int | None) -> dict[str, str]:
    words = ["-o", "BatchMode=yes", *(["-p", str(ssh_port)] if ssh_port is not None else [])]
    present = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    return {"PDSH_SSH_ARGS_APPEND": f"{present} {shlex.join(words)}".strip()}
