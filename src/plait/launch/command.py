"""A command line of another program, complete enough to be shown, and to be run from what was shown."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plait.errors import WorldError
from plait.launch.desk import Desk
from plait.launch.local import Signals, follow_the_launcher

_GRACE_S = 5.0
"""How long it may take to leave after SIGTERM, once the user has waited enough."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of what is there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text: written before it starts."""
    keep_files: bool = False
    """They stay when it has ended."""
    stdin: str | None = None
    """What it is given to read."""

    def shown(self) -> str:
        """As a shell would take it."""
        files = [f"cat > {shlex.quote(path)} <<'END'\n{text.rstrip()}\nEND" for path, text in self.files.items()]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*variables, shlex.join(self.argv)])
        return "\n".join([*files, line if self.stdin is None else f"{line} <<'END'\n{self.stdin}\nEND"])

    @contextmanager
    def with_files(self) -> Iterator[None]:
        """Its files are there while it runs."""
        for path, text in self.files.items():
            Path(path).write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            for path in () if self.keep_files else self.files:
                Path(path).unlink(missing_ok=True)


def run_command(
    command: Command, *, patience: float | None, afterwards: Sequence[Command] = (), desk: Desk | None = None
) -> int:
    """Run it to its end; returns its exit code, or the worst rank's where the `desk` knows.

    A signal ends it, and `afterwards` ends what it may have left.
    """
    with command.with_files():
        code, signals = _run(command, patience, desk)
    if desk is not None and not signals.waited:
        code = desk.conclude(code)
    code = signals.code(code)
    if code:
        for other in afterwards:
            subprocess.run(other.argv, env={**os.environ, **other.environment}, check=False)
    return code


def _run(command: Command, patience: float | None, desk: Desk | None) -> tuple[int, Signals]:
    try:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment},
            process_group=0,
            preexec_fn=follow_the_launcher,
        )
    except OSError as error:
        raise WorldError(f"{command.argv[0]} could not be started: {error}; is it installed?") from error
    attend = time.sleep if desk is None else desk.attend
    with Signals(lambda number: _pass_on(process, number, desk)) as signals:
        while process.poll() is None:
            if patience is not None and signals.waited > patience:
                process.terminate()
            if signals.interrupts > 1 or (patience is not None and signals.waited > patience + _GRACE_S):
                process.kill()
            attend(0.05)
    code = process.returncode
    return 128 - code if code < 0 else code, signals


def _pass_on(process: subprocess.Popen[bytes], number: int, desk: Desk | None) -> None:
    """To the ranks themselves, where they can be reached, so that they have time to save.

    Else to what started them: mpirun, srun and pdsh all end their processes on SIGTERM, while two of them want SIGINT
    twice.
    """
    if desk is not None and desk.connected:
        desk.send(number)
    elif process.poll() is None:
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
