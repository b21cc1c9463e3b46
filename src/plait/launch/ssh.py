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


def options_and_first(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """`--launcher_args` for ssh and pdsh: their own options, and what each host is to do first (`source env.sh`)."""
    begins = next((at for at, word in enumerate(words) if word in ("source", ".")), len(words))
    if words and not words[0].startswith("-"):
        begins = 0
    first = list(words[begins:])
    if first[:1] == ["source"]:
        first[0] = "."  # which every shell knows; but it looks for a bare name elsewhere
    if first[:1] == ["."] and len(first) > 1 and "/" not in first[1]:
        first[1] = f"./{first[1]}"
    return tuple(words[:begins]), shlex.join(first)


def shell_line(words: Sequence[str], *, folder: str | None, environment: Mapping[str, str], first: str = "") -> str:
    """A command as a line of shell: from a folder, after what is to be done `first`, with some variables."""
    start = f"cd {shlex.quote(folder)} && " if folder else ""
    start += f"{first} && " if first else ""
    # Only what Python itself needs to start; the rest goes with the job, out of sight of `ps`.
    variables = [f"{name}={value}" for name, value in environment.items() if name.startswith("PYTHON")]
    return start + shlex.join(["exec", *(["env", *variables] if variables else []), *words])


def node_words(node: int) -> list[str]:
    """The command of the hand on a host."""
    return [sys.executable, "-m", "plait.launch.node", "--node", str(node)]
