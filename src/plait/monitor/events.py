"""Events, which a run emits, and the sinks that receive them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


class EventKind(StrEnum):
    """The kinds of event, in the order in which a run emits them."""

    RUN_START = "run_start"
    """data: a table of the run's settings (config, model size, world, strategy), as text."""
    TRAIN = "train"
    """data: the averages since the last TRAIN event (see `plait.trainer.throughput.Meter`)."""
    VALIDATE = "validate"
    """data: the metrics of one validation."""
    TEST = "test"
    """data: the metrics of one test."""
    SAVE = "save"
    """data: path, seconds, bytes."""
    MESSAGE = "message"
    """data: level (info, warning, error), text."""
    RUN_END = "run_end"
    """data: reason, seconds, steps; with pipeline parallelism also its idle share (`pipeline`)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run, at one step."""

    kind: EventKind
    step: int
    epoch: int
    data: Mapping[str, Any]
    time: float = field(default_factory=time.time)


class MessageEvent(str):
    """A text that an engine emits as an `info` message; its other texts become warnings."""

    __slots__ = ()


@runtime_checkable
class Sink(Protocol):
    """Receives events. A user-provided sink is named in `log.sinks`; it needs no base class.

    It is constructed as `Name(work_dir, **its keys)` before the first event, on rank 0, with `work_dir` as a
    `pathlib.Path` to an existing folder. A class with a true attribute `every_rank` is constructed on every rank, as
    `Name(work_dir, rank=…, **its keys)`, and gets the events of its own rank. An optional method `tick(step)` is called
    after every training step.

    If one of its methods raises, the other sinks get a warning, and the sink is closed and not used any more; training
    continues. It is called in the training thread, which waits.
    """

    def write(self, event: Event) -> None:
        """Handle one event. Must not raise for an unknown kind."""

    def close(self) -> None:
        """Flush and release resources. Called once, at the end of the run or after a failure of the sink."""
