"""Runs the steps that are not complete, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from plait.launch import STOPPED_CODES
from plait.posttrain.pipeline.chain import Step
from plait.posttrain.pipeline.folder import State, ending, newest, state_of, write_description
from plait.posttrain.pipeline.summary import draw_report

Start = Callable[[list[str]], int]
"""Runs a command of `plait`, given without its name, on every rank; returns its exit code."""


def command_of(step: Step, description: Path) -> list[str]:
    """The command that runs a step, or goes on with it."""
    resume = [] if newest(step.folder) is None else ["checkpoint.resume=auto"]
    return [step.phase, str(description), *resume]


def run_steps(steps: Sequence[Step], start: Start, say: Callable[[str], None]) -> int:
    """Run what is not complete. Ends at the first step that fails or is stopped, with its exit code; 0 at the end.

    A step counts as complete by what its own run wrote when it ended, so a pipeline that was killed finds where it was.
    """
    for step in steps:
        name = f"step {step.number} of {len(steps)}, {step.phase}"
        state = state_of(step)
        if not step.chosen:
            continue
        if state is State.COMPLETE:
            say(f"{name}: complete, in {step.folder}")
            continue
        say(f"{name}: {'goes on' if newest(step.folder) is not None else 'begins'} in {step.folder}")
        code = start(command_of(step, write_description(step)))
        if (page := draw_report(step)) is not None:
            say(f"{name}: {page}")
        if code in STOPPED_CODES:
            say(f"{name}: was stopped; what there is lies in {step.folder}")
            return code
        if code != 0:
            say(f"{name}: failed with exit code {code}; what there is lies in {step.folder}")
            return code
        if state_of(step) is not State.COMPLETE:
            reason = ending(step.folder) or "no reason is written down"
            say(f"{name}: ended early ({reason})")
            return 1
    return 0
