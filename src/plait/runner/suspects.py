"""Which samples a step had that went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import DataError

if TYPE_CHECKING:
    from plait.runner.runner import Runner

FILE = "suspects.jsonl"
_SHOWN = 8


def samples_at(runner: Runner, epoch: int, step: int) -> list[int]:
    """The samples of a step of an epoch, over all ranks: their numbers in the data set, or in the stream."""
    loader, total = runner.loader, runner.batch.total
    try:
        return [int(sample) for sample in loader.sample_ids(epoch, step)]
    except DataError:  # a stream has only its own order
        return list(range(step * total, (step + 1) * total))


def whose(runner: Runner, step: int) -> str:
    """The samples of the latest step or one shortly before it, noted in a file and shown in short.

    `step` counts from 0, as the engine does. Empty where nobody knows: another loop than the Runner's trains.
    """
    if runner.began is None or not hasattr(runner.loader, "sample_ids"):
        return ""
    latest, epoch, at = runner.began
    at -= latest - step
    if at < 0:
        if epoch == 0 or runner.steps_per_epoch is None:
            return ""
        epoch, at = epoch - 1, at + runner.steps_per_epoch
    return f"; {note(runner, epoch, at, step=step + 1, why='not finite')}"


def note(runner: Runner, epoch: int, at: int, **facts: Any) -> str:
    """Write down which samples a step had, and show the first of them."""
    samples = samples_at(runner, epoch, at)
    if runner.world.is_main:
        line = {**facts, "epoch": epoch + 1, "step_in_epoch": at + 1, "samples": samples}
        with (Path(runner.config.work_dir) / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    shown = ", ".join(map(str, samples[:_SHOWN]))
    more = f" and {len(samples) - _SHOWN} more, see {FILE}" if len(samples) > _SHOWN else ""
    return f"its samples: {shown}{more}"
