"""Launchers as somebody outside would write them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from plait.launch import Command, Job, host_words


class ShellLauncher:
    """Starts each host's ranks by a shell on this one."""

    def __call__(self, job: Job, arguments: Sequence[str]) -> Command:
        lines = [f"{shlex.join(host_words(job, node))} &" for node in range(len(job.nodes))]
        return Command(("sh", "-c", "\n".join([f"echo started with {' '.join(arguments)}", *lines, "wait"])))


def starts_nothing(job: Job, arguments: Sequence[str]) -> str:
    """Return what cannot be run."""
    return "sh"
