"""Commands on other hosts. ssh is all that is needed there: no pdsh, no daemon."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OPTIONS = (
    ("BatchMode", "yes"),  # an error instead of a question nobody sees
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "3"),  # a host that is unplugged is noticed after 15 seconds
)


@dataclass(frozen=True, slots=True)
class Ssh:
    """How to get onto a host."""

    port: int | None = None
    arguments: tuple[str, ...] = ()
    """More of ssh's own, from `--launcher_args`; they come first and so win."""

    def command(self, host: str, remote: str) -> list[str]:
        """The ssh command that runs a line of shell on `host`."""
        options = [word for name, value in OPTIONS for word in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port is not None else []
        return ["ssh", *self.arguments, *options, *port, "-T", host, remote]


def shell_line(words: Sequence[str], *, folder: str | None, environment: Mapping[str, str]) -> str:
    """A command as a line of shell: from a folder, with some variables."""
    start = f"cd {shlex.quote(folder)} && " if folder else ""
    # Only what Python itself needs to start; the rest goes with the job, out of sight of `ps`.
    variables = [f"{name}={value}" for name, value in environment.items() if name.startswith("PYTHON")]
    return start + shlex.join(["exec", *(["env", *variables] if variables else []), *words])


def node_words(node: int) -> list[str]:
    """The command of the hand on a host."""
    return [sys.executable, "-m", "plait.launch.node", "--node", str(node)]
