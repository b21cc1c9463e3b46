"""Events: what a run reports while it goes on, and where the reports go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


class EventKind(StrEnum):
    """The kinds of event, in the order in which a run emits them."""

    RUN_START = "run_start"
    """data: everything the run will use (config, model size, world, strategy), ready to show."""
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
    """data: reason, seconds, steps; of a pipeline also how idle it was (`pipeline`)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, at one step."""

    kind: EventKind
    step: int
    epoch: int
    data: Mapping[str, Any]
    time: float = field(default_factory=time.time)


class MessageEvent(str):
    """A message that is good to know. What an engine says otherwise is for somebody to look at: a warning."""

    __slots__ = ()


@runtime_checkable
class Sink(Protocol):
    """A place events go to. One of your own stands in `log.sinks`; it needs no base class.

    It is made as `Name(work_dir, **its keys)`, with `work_dir` as a `pathlib.Path` to a folder that is there, before
    the first event; rank 0 has it alone. A class with an attribute `every_rank` that is true is made on every rank,
    as `Name(work_dir, rank=…, **its keys)`, and hears what its own rank says. A further method `tick(step)` is called
    after every step of training.

    Whatever one of its methods raises is warned of in the other sinks, and the sink is closed and left out from then
    on: training goes on. It is called in the thread that trains, which waits.
    """

    def write(self, event: Event) -> None:
        """Take one event. Must not raise for a kind that it does not know."""

    def close(self) -> None:
        """Flush and release: the run is over, or the sink has failed. It is called once."""
