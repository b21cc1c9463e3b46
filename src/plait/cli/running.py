"""What all commands that train have in common: smaller micro-batches where memory is short, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from plait.launch import LEAK_REMEDY, become_smaller, growth_text, launched_size
from plait.spec import Phase

if TYPE_CHECKING:
    from plait.runner import Runner


def train_with(runner: Runner, words: Sequence[str]) -> None:
    """Train; `words` are the command that this process was started with, without the name of the program.

    A run that somebody stopped says how to go on, and ends the process with 128 and the signal: a script that looks
    at the exit code must not take it for a finished one.
    """
    with _smaller_if_full(runner, words):
        runner.train()
    leave_if_stopped(runner)


def leave_if_stopped(runner: Runner) -> None:
    """End a process whose run a signal has stopped. Every rank must ask."""
    from plait.runner import STOPPED

    # The ranks wait for each other here: some launchers end the others as soon as one has left with such a code.
    if not runner.stopping() or (code := STOPPED.get(str(runner.stop_reason))) is None:
        return
    if runner.config.checkpoint.last and runner.world.is_main:
        typer.echo("go on with the same command and `checkpoint.resume=auto`")
    runner.enter(Phase.LEFT)
    sys.exit(code)


@contextmanager
def _smaller_if_full(runner: Runner, words: Sequence[str]) -> Iterator[None]:
    """Where memory is short in a step of a run of one process, start again with smaller micro-batches.

    A launcher, where there is one, does the same for its ranks.
    """
    from torch import OutOfMemoryError

    try:
        yield
        return
    except OutOfMemoryError as error:
        phase = runner.world.heartbeat.phase
        # Without a launcher nobody reads the phases of a step, so it does not tell them: all of it is idle time.
        if launched_size() is not None or not (phase.has_batches or phase is Phase.IDLE):
            raise
        if (steps := runner.step_memory.growth) is not None:
            error.add_note(f"plait: {growth_text(steps)}. {LEAK_REMEDY}.")
            raise
        ranks, reason = runner.world.ranks, str(error).partition(".")[0]
    runner.close()
    command = [sys.executable, "-m", "plait", *words]
    become_smaller(command, attempt=ranks.attempt, split=ranks.split, why=reason)
