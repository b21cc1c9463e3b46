"""What the folder of a step says about it: new, begun, complete, or of another run."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from plait.checkpoint import CheckpointFolder, saved_at
from plait.config import RunConfig, parse, read_json_object, rows, show, to_yaml
from plait.errors import ConfigError, DataError, Problem
from plait.posttrain.pipeline.chain import Step
from plait.runner import STOPPED

DESCRIPTION = "step.yaml"
"""In the folder of a step: all of its settings, as it was started with."""

_FREE = frozenset({"strategy", "log", "plan", "device", "backend", "timeout_s", "checkpoint", "deterministic"})
"""Sections that may change between two attempts: they say how, not what."""
_FREE_KEYS = frozenset({"batch.micro", "batch.accumulation", "train.stop_after"})
_CUT_SHORT = ("failed", "stopped at step", *STOPPED)
"""How the reasons begin for which a run ends early and is to go on."""


class State(StrEnum):
    """How far a step is."""

    NEW = "new"
    BEGUN = "begun"
    COMPLETE = "complete"


def state_of(step: Step) -> State:
    """How far a step is, by what lies in its folder."""
    if not (step.folder / DESCRIPTION).is_file():
        return State.NEW
    if newest(step.folder) is None or ending(step.folder) is None:
        return State.BEGUN
    return State.BEGUN if str(ending(step.folder)).startswith(_CUT_SHORT) else State.COMPLETE


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a step."""
    return CheckpointFolder(folder / "checkpoints").newest()


def ending(folder: Path) -> str | None:
    """Why the last run in a folder ended; None where none came to an end."""
    try:
        return str(read_json_object(folder / "report.json", DataError)["reason"])
    except (DataError, KeyError):
        return None


def problems_with(step: Step) -> Iterator[Problem]:
    """Why a step cannot use its folder."""
    where = f"step {step.number}, {step.phase}"
    if step.folder.exists() and not step.folder.is_dir():
        yield Problem("work_dir", f"{str(step.folder)!r} is no folder", "Choose another one.", where)
        return
    made, written = newest(step.folder), step.folder / DESCRIPTION
    if made is None:  # nothing of value is there
        return
    remedy = "Choose another `--output-dir`, or move that folder away."
    if not written.is_file():
        yield Problem("work_dir", f"{str(step.folder)!r} holds a run that no pipeline started", remedy, where)
    elif differing := differences(written, step.config):
        message = f"{str(step.folder)!r} holds this step with other settings: {'; '.join(differing)}"
        yield Problem("work_dir", message, remedy, where)
    for before in step.after:
        began_with = newest(before.folder)
        if began_with is not None and saved_at(made) < saved_at(began_with):
            message = f"{str(step.folder)!r} is older than {str(before.folder)!r}, which it begins with"
            yield Problem("work_dir", message, "Move it away, and it is made anew.", where)


def differences(written: Path, config: RunConfig, most: int = 3) -> list[str]:
    """Settings that a step was started with and that are others now; the first few."""
    try:
        old = dict(rows(parse(written).config))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    new = dict(rows(config))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _free(key)]
    return [f"{key} was {show(old.get(key))} and is {show(new.get(key))}" for key in keys[:most]]


def write_description(step: Step) -> Path:
    """Write down what a step is started with, in its folder."""
    path = step.folder / DESCRIPTION
    try:
        step.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(step.config), encoding="utf-8")
    except OSError as error:
        message = f"{str(step.folder)!r} cannot be written to: {error.strerror}"
        raise ConfigError(Problem("work_dir", message, "Choose another `--output-dir`.")) from error
    return path


def _free(key: str) -> bool:
    return key.partition(".")[0] in _FREE or key in _FREE_KEYS
