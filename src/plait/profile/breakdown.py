"""The time of a step by category: each moment has one category, so that the categories add up to the whole step.

A *slice* is an interval in which an operator runs itself, and not an operator that it calls.

[Note: one category at every moment]
Many things run concurrently: kernels on several streams, collectives, the host ahead of the device. The category of a
moment is the first of these that is running: a validation or a save between steps; computation; communication, which
is then *exposed*; copies between host and device; an optimizer update on threads of the host; waiting for data. If none
is, a moment is idle time of the device, or, on a CPU, time of Python and the framework. So communication counts as
exposed exactly when nothing is computed at the same time, and as *hidden* otherwise.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plait.errors import TrainingError
from plait.profile.marks import (
    BETWEEN_STEPS,
    CATEGORIES,
    COMMUNICATION,
    COMPILED,
    COMPUTE,
    IDLE,
    MARKS,
    MODULE,
    PHASE,
    category_of_kernel,
    category_of_op,
    is_point_to_point,
    is_running_collective,
    is_update,
)

# Reading a Chrome trace of torch's profiler: threads of the host, streams of the device, and recorded steps.


_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BACKWARD = "autograd::engine::evaluate_function"


class TraceSpan(NamedTuple):
    """An event of the trace with a duration. Times are in microseconds, as in the file."""

    start: float
    end: float
    name: str
    cat: str
    args: Mapping[str, Any]


@dataclass(slots=True)
class Trace:
    """A parsed trace. The spans of each thread and stream are in the order of their start."""

    main: int
    """The training thread."""
    threads: dict[int, list[TraceSpan]]
    """Operators and annotations of the host, by thread."""
    streams: dict[int, list[TraceSpan]]
    """Kernels and copies of the device, by stream; empty in a run on the CPU."""
    launches: dict[int, tuple[int, float]]
    """Correlation id of a kernel → (the thread that launched it, when)."""
    steps: list[tuple[float, float]]
    """(Start, end) of each recorded step."""
    phases: TracePhases = field(default_factory=lambda: TracePhases([], []))

    def between_steps(self) -> list[TraceSpan]:
        """Return the validations and saves between steps."""
        return [span for span in self.threads[self.main] if MARKS.get(span.name) in BETWEEN_STEPS]

    @property
    def window(self) -> tuple[float, float]:
        """(Start of the first recorded step, end of the last)."""
        return self.steps[0][0], self.steps[-1][1]

    @property
    def on_device(self) -> bool:
        """Whether the arithmetic ran on a device other than the CPU."""
        return bool(self.streams)


class TracePhases:
    """The phases of a trace, looked up by time."""

    def __init__(self, spans: Iterable[TraceSpan], backward: Iterable[TraceSpan]) -> None:
        self.spans = [(span.start, span.end, span.name.removeprefix(PHASE)) for span in spans]
        self._starts = [start for start, _, _ in self.spans]
        self._backward = merged((span.start, span.end) for span in backward)
        self._backward_starts = [start for start, _ in self._backward]

    def at(self, moment: float) -> str:
        """Return the phase; `idle` between steps. In a pipeline, `forward` contains backward passes too."""
        index = bisect_right(self._starts, moment) - 1
        if index < 0 or moment >= self.spans[index][1]:
            return "idle"
        phase = self.spans[index][2]
        return "backward" if phase == "forward" and self.in_backward(moment) else phase

    def in_backward(self, moment: float) -> bool:
        """Return whether autograd runs a backward pass at this time."""
        index = bisect_right(self._backward_starts, moment) - 1
        return index >= 0 and moment < self._backward[index][1]

    def boundaries(self) -> list[float]:
        """Return the times at which the phase may change."""
        forward = [(start, end) for start, end, _ in self.spans]
        return [edge for interval in [*forward, *self._backward] for edge in interval]


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint ones."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def read_trace(path: Path) -> Trace:
    """Return the trace in a file of `torch.profiler`; raise `TrainingError` if no step is marked in it."""
    threads: dict[int, list[TraceSpan]] = defaultdict(list)
    streams: dict[int, list[TraceSpan]] = defaultdict(list)
    launches: dict[int, tuple[int, float]] = {}
    steps: list[tuple[float, float]] = []
    main = None
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, track, args = event.get("cat", ""), event["tid"], event.get("args", {})
        span = TraceSpan(event["ts"], event["ts"] + event["dur"], event["name"], category, args)
        if category in _HOST:
            threads[track].append(span)
            if span.name.startswith("ProfilerStep#"):
                main = track
                steps.append((span.start, span.end))
        elif category in _DEVICE:
            streams[track].append(span)
        elif category in _LAUNCHES and "correlation" in args:
            launches[args["correlation"]] = (track, span.start)
    if main is None:
        raise TrainingError(f"{path} holds no recorded step: was the run ended while it was profiled?")
    for spans in (*threads.values(), *streams.values()):
        spans.sort(key=lambda span: (span.start, -span.end))
    phases = TracePhases(
        (span for span in threads[main] if span.name.startswith(PHASE)),
        (span for spans in threads.values() for span in spans if span.name.startswith(_BACKWARD)),
    )
    return Trace(main, dict(threads), dict(streams), launches, sorted(steps), phases)


# The innermost operator at every moment of a thread, with its module and phase.


_STICKY = ("matmul", "attention", "packing", COMMUNICATION, "data", "evaluate", "save")
"""Categories that also apply to the operators that an operator of them calls."""
_PHASES_OF_UPDATE = ("step",)


class Slice(NamedTuple):
    """An interval of one operator's own time."""

    start: float
    end: float
    category: str | None
    """None if it computes nothing."""
    name: str
    module: str | None
    phase: str
    first: bool
    """Whether it is the first slice of its operator; the others follow an operator that it called."""

    @property
    def length(self) -> float:
        """The duration in microseconds."""
        return self.end - self.start


@dataclass(slots=True)
class _Frame:
    """An operator that is running."""

    end: float
    cursor: float
    name: str
    category: str | None
    inherited: str | None
    """The category of all operators that it calls; None: each has its own."""
    module: str | None
    back: bool
    first: bool = True


def host_slices(trace: Trace) -> dict[int, list[Slice]]:
    """Return thread → slices. The training thread is read first: backward operators look up its modules."""
    owners: dict[int, str | None] = {}
    order = sorted(trace.threads, key=lambda thread: thread != trace.main)
    return {thread: list(_flatten(trace.threads[thread], trace, owners)) for thread in order}


def _flatten(spans: Sequence[TraceSpan], trace: Trace, owners: dict[int, str | None]) -> Iterator[Slice]:
    stack: list[_Frame] = []
    for span in spans:
        if is_running_collective(span.name):
            continue  # it runs concurrently with the thread, and longer than the thread's operators
        while stack and stack[-1].end <= span.start:
            yield from _rest(stack.pop(), trace)
        parent = stack[-1] if stack else None
        end = span.end if parent is None else min(span.end, parent.end)
        if parent is not None:
            yield from _rest(parent, trace, until=span.start)
            parent.cursor = max(parent.cursor, end)
        stack.append(_frame(span, end, parent, owners))
    while stack:
        yield from _rest(stack.pop(), trace)


def _rest(frame: _Frame, trace: Trace, until: float | None = None) -> Iterator[Slice]:
    """Yield the slice of a frame since the last operator that it called, if there is one."""
    end = frame.end if until is None else until
    if end > frame.cursor or (until is None and frame.first):
        phase = trace.phases.at(frame.cursor)
        category = frame.category
        if category is not None and phase in _PHASES_OF_UPDATE and category not in (COMMUNICATION, *MARKS.values()):
            category = "optimizer"
        yield Slice(frame.cursor, max(end, frame.cursor), category, frame.name, frame.module, phase, frame.first)
        frame.first = False
        frame.cursor = max(end, frame.cursor)


def _frame(span: TraceSpan, end: float, parent: _Frame | None, owners: dict[int, str | None]) -> _Frame:
    above, module, back = (None, None, False) if parent is None else (parent.inherited, parent.module, parent.back)
    name = span.name
    if name.startswith("autograd::engine::evaluate_function"):
        module, back = None, True
    if name.startswith(MODULE):
        module = name.removeprefix(MODULE)
    number = span.args.get("Sequence number")
    if number is not None:
        # The sequence number of the autograd node: the last forward operator with it made the node.
        if not back:
            owners[number] = module
        elif module is None:
            module = owners.get(number)
    category = MARKS.get(name) or category_of_op(name)
    if above is not None and (category != COMMUNICATION or above in MARKS.values()):
        category = above
    inherited = category if category in _STICKY else None
    if span.cat == "user_annotation" and category not in MARKS.values() and not name.startswith(COMPILED):
        category = None  # an annotation is not an operator, and computes nothing
    return _Frame(end, span.start, name, category, inherited, module, back)


def device_slices(trace: Trace, hosts: dict[int, list[Slice]]) -> dict[int, list[Slice]]:
    """Return stream → slices, with the module and the phase of the operator that launched each."""
    starts = {thread: [piece.start for piece in slices] for thread, slices in hosts.items()}

    def launched(span: TraceSpan) -> Slice | None:
        thread, moment = trace.launches.get(span.args.get("correlation", -1), (-1, 0.0))
        index = bisect_right(starts.get(thread, []), moment) - 1
        launcher = hosts[thread][index] if index >= 0 else None
        return launcher if launcher is not None and moment < launcher.end else None

    return {stream: [_on_device(span, launched(span)) for span in spans] for stream, spans in trace.streams.items()}


def _on_device(span: TraceSpan, source: Slice | None) -> Slice:
    category = category_of_kernel(span.name, span.cat)
    phase, module = ("idle", None) if source is None else (source.phase, source.module)
    if category not in (COMMUNICATION, "copies") and source is not None:
        if phase in _PHASES_OF_UPDATE:
            category = "optimizer"
        elif source.category in _STICKY and source.category != COMMUNICATION:
            category = source.category
    return Slice(span.start, span.end, category, span.name, module, phase, first=True)


_EXPECTED = "expected"
"""The category of a receive: it counts as communication if it is exposed, and is never counted as hidden."""
_LAYERS = (BETWEEN_STEPS, COMPUTE, (COMMUNICATION, _EXPECTED), ("copies",), ("update",), ("data",))
"""The categories by priority: a moment belongs to the first that is active."""
_LAYER_OF = {category: index for index, layer in enumerate(_LAYERS) for category in layer}
_OPERATORS = 40
"""How many operators a breakdown has: those with the most time."""
Interval = tuple[float, float, str]
"""Start, end, category."""


@dataclass(slots=True)
class TimeUse:
    """Calls and milliseconds of an operator or a category, per step on average."""

    calls: float = 0.0
    ms: float = 0.0


@dataclass(slots=True)
class Operator(TimeUse):
    """An operator of the host or a kernel of the device."""

    name: str = ""
    kind: str = ""


@dataclass(slots=True)
class TimeBreakdown:
    """One rank's time per step, on average over the recorded ones."""

    steps: int
    ms: float
    """Milliseconds of a step, from the end of the step before to its own end."""
    kinds: dict[str, TimeUse] = field(default_factory=dict)
    """The time of each category; the `ms` add up to that of the step."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same milliseconds, by phase and category."""
    hidden_ms: float = 0.0
    """Communication time during which something was computed."""
    operators: list[Operator] = field(default_factory=list)
    """Those with the most time, in descending order."""
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds of arithmetic by module and direction (`forward`, `backward`), without its submodules."""


@dataclass(slots=True)
class Timeline:
    """A trace as slices of threads and streams, and the category of each moment."""

    trace: Trace
    hosts: dict[int, list[Slice]]
    streams: dict[int, list[Slice]]
    moments: list[Interval]
    """The recorded steps, divided into intervals with one category each."""
    hidden: float
    """Microseconds of hidden communication."""

    @property
    def work(self) -> Iterator[Slice]:
        """The slices that compute: those of the device, where there is one."""
        tracks = self.streams.values() if self.trace.on_device else [self.hosts[self.trace.main]]
        return (piece for track in tracks for piece in track)


def attribute_time(trace: Trace) -> Timeline:
    """Return the timeline of a trace, with a category for each moment of the recorded steps."""
    hosts = host_slices(trace)
    streams = device_slices(trace, hosts)
    moments, hidden = _sweep(_busy(trace, hosts, streams), trace)
    return Timeline(trace, hosts, streams, moments, hidden)


def _busy(trace: Trace, hosts: dict[int, list[Slice]], streams: dict[int, list[Slice]]) -> Iterator[Interval]:
    mine = [piece for piece in hosts[trace.main] if piece.category not in BETWEEN_STEPS]
    yield from ((span.start, span.end, MARKS[span.name]) for span in trace.between_steps())
    if trace.on_device:
        yield from ((piece.start, piece.end, "update") for piece in mine if is_update(piece.name))
        mine = [piece for piece in mine if piece.category == "data"]
    else:
        yield from _under_way(trace)
    for thread, slices in hosts.items():
        if thread != trace.main:
            yield from ((piece.start, piece.end, "update") for piece in slices if is_update(piece.name))
    for slices in (mine, *streams.values()):
        yield from ((piece.start, piece.end, piece.category) for piece in slices if piece.category is not None)


def _under_way(trace: Trace) -> Iterator[Interval]:
    """Yield the intervals of communication on threads of the host."""
    spans = [span for spans in trace.threads.values() for span in spans if is_running_collective(span.name)]
    for start, end in merged((span.start, span.end) for span in spans if not is_point_to_point(span.name)):
        yield start, end, COMMUNICATION
    # A receive that is posted early does not transfer all the time, but the trace has nothing else to show the wait.
    for start, end in merged((span.start, span.end) for span in spans if span.name.endswith(":recv")):
        yield start, end, _EXPECTED


def _sweep(busy: Iterable[Interval], trace: Trace) -> tuple[list[Interval], float]:
    """Return the category of each moment, and the hidden communication time. [Note: one category at every moment]"""
    start, end = trace.window
    edges: list[tuple[float, int, str]] = [(edge, 0, "") for edge in trace.phases.boundaries() if start < edge < end]
    for begins, stops, category in busy:
        if begins < end and stops > start:
            edges += [(max(begins, start), 1, category), (min(stops, end), -1, category)]
    edges.append((end, 0, ""))
    edges.sort(key=lambda edge: edge[0])
    active: Counter[str] = Counter()
    moments: list[Interval] = []
    hidden, at = 0.0, start
    for moment, change, category in edges:
        if moment > at:
            chosen = min((candidate for candidate in active if active[candidate]), key=_rank, default=IDLE)
            moments.append((at, moment, COMMUNICATION if chosen == _EXPECTED else chosen))
            if active[COMMUNICATION] and chosen in COMPUTE:
                hidden += moment - at
            at = moment
        if change:
            active[category] += change
    return moments, hidden


def _rank(category: str) -> tuple[int, int]:
    return _LAYER_OF[category], CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)


def breakdown_of(timeline: Timeline) -> TimeBreakdown:
    """Return the time by category, phase, operator and module, per step on average."""
    trace, steps = timeline.trace, len(timeline.trace.steps)
    start, end = trace.window
    scale = 1e-3 / steps
    breakdown = TimeBreakdown(steps, (end - start) * scale, hidden_ms=timeline.hidden * scale)
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    for begins, stops, category in timeline.moments:
        breakdown.kinds.setdefault(category, TimeUse()).ms += (stops - begins) * scale
        phases[trace.phases.at(begins)][category] += (stops - begins) * scale  # type: ignore[assignment]
    breakdown.phases = {phase: dict(by_category) for phase, by_category in phases.items()}
    operators: dict[tuple[str, str], Operator] = {}
    for piece in timeline.work:
        if piece.category is None or piece.category in MARKS.values() or not start <= piece.start < end:
            continue
        use = operators.setdefault((piece.name, piece.category), Operator(name=piece.name, kind=piece.category))
        use.ms += piece.length * scale
        use.calls += piece.first / steps
        if piece.category in breakdown.kinds:
            breakdown.kinds[piece.category].calls += piece.first / steps
        if piece.module is not None and piece.category in COMPUTE and piece.category != "optimizer":
            module = breakdown.modules.setdefault(piece.module, {"forward": 0.0, "backward": 0.0})
            module["forward" if piece.phase == "forward" else "backward"] += piece.length * scale
    breakdown.kinds = {category: breakdown.kinds[category] for category in CATEGORIES if category in breakdown.kinds}
    breakdown.operators = sorted(operators.values(), key=lambda use: -use.ms)[:_OPERATORS]
    return breakdown
