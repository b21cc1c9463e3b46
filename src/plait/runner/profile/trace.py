"""A Chrome trace of torch's profiler, read back: threads of the host, streams of the device, and recorded steps."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plait.errors import TrainingError
from plait.runner.profile.kinds import ASIDE, MARKS, PHASE

_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BACKWARD = "autograd::engine::evaluate_function"


class Span(NamedTuple):
    """Something that took time. Times are in microseconds, as in the file."""

    start: float
    end: float
    name: str
    category: str
    args: Mapping[str, Any]


@dataclass(slots=True)
class Trace:
    """What a trace says. All spans of a lane are in the order in which they began."""

    main: int
    """The thread that trains."""
    threads: dict[int, list[Span]]
    """Operators and marks of the host, by thread."""
    streams: dict[int, list[Span]]
    """What ran on the device, by stream; empty where all is on the host."""
    launches: dict[int, tuple[int, float]]
    """By the number that a kernel carries: the thread that launched it, and when."""
    steps: list[tuple[float, float]]
    phases: Phases = field(default_factory=lambda: Phases([], []))

    def asides(self) -> list[Span]:
        """What happened between steps: validations and saves."""
        return [span for span in self.threads[self.main] if MARKS.get(span.name) in ASIDE]

    @property
    def window(self) -> tuple[float, float]:
        """From the begin of the first recorded step to the end of the last."""
        return self.steps[0][0], self.steps[-1][1]

    @property
    def on_device(self) -> bool:
        """Whether a device beside the host did the arithmetic."""
        return bool(self.streams)


class Phases:
    """Which phase a moment belongs to."""

    def __init__(self, spans: Iterable[Span], backward: Iterable[Span]) -> None:
        self.spans = [(span.start, span.end, span.name.removeprefix(PHASE)) for span in spans]
        self._starts = [start for start, _, _ in self.spans]
        self._backward = merged((span.start, span.end) for span in backward)
        self._backward_starts = [start for start, _ in self._backward]

    def at(self, moment: float) -> str:
        """The phase; `idle` between steps. A pipeline goes forward and back in turns, which its operators tell."""
        index = bisect_right(self._starts, moment) - 1
        if index < 0 or moment >= self.spans[index][1]:
            return "idle"
        phase = self.spans[index][2]
        return "backward" if phase == "forward" and self.goes_back(moment) else phase

    def goes_back(self, moment: float) -> bool:
        """Whether autograd is at work."""
        index = bisect_right(self._backward_starts, moment) - 1
        return index >= 0 and moment < self._backward[index][1]

    def boundaries(self) -> list[float]:
        """The moments at which the phase may change."""
        told = [(start, end) for start, end, _ in self.spans]
        return [edge for interval in [*told, *self._backward] for edge in interval]


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments as intervals that neither touch nor overlap."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def read_trace(path: Path) -> Trace:
    """Read a file that `torch.profiler` wrote, with steps marked."""
    threads: dict[int, list[Span]] = defaultdict(list)
    streams: dict[int, list[Span]] = defaultdict(list)
    launches: dict[int, tuple[int, float]] = {}
    steps: list[tuple[float, float]] = []
    main = None
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, lane, args = event.get("cat", ""), event["tid"], event.get("args", {})
        span = Span(event["ts"], event["ts"] + event["dur"], event["name"], category, args)
        if category in _HOST:
            threads[lane].append(span)
            if span.name.startswith("ProfilerStep#"):
                main = lane
                steps.append((span.start, span.end))
        elif category in _DEVICE:
            streams[lane].append(span)
        elif category in _LAUNCHES and "correlation" in args:
            launches[args["correlation"]] = (lane, span.start)
    if main is None:
        raise TrainingError(f"{path} holds no recorded step: was the run ended while it was profiled?")
    for spans in (*threads.values(), *streams.values()):
        spans.sort(key=lambda span: (span.start, -span.end))
    phases = Phases(
        (span for span in threads[main] if span.name.startswith(PHASE)),
        (span for spans in threads.values() for span in spans if span.name.startswith(_BACKWARD)),
    )
    return Trace(main, dict(threads), dict(streams), launches, sorted(steps), phases)
