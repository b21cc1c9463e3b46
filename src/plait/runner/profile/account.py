"""Where the time of a step goes: one kind at every moment, so that the kinds add up to the whole.

[Note: one kind at every moment]
Many things happen at once: kernels on several streams, messages under way, a host that is ahead or behind. A moment
is given to arithmetic where any runs; else to messages, which then are waited for; else to copies between host and
device; else to an update on threads of the host; else to data, where the run waits for them. A validation or a save
between steps has all of its time. What is left is called by its name too: on a device it is idle, on a host Python and
the framework are at work. So a message counts as waited for exactly where nothing was computed beside it, and the rest
of its time was hidden.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from plait.runner.profile.kinds import (
    ASIDE,
    COMMUNICATION,
    COMPUTE,
    IDLE,
    KINDS,
    MARKS,
    is_between_two,
    is_running_collective,
    is_update,
)
from plait.runner.profile.slices import Slice, device_slices, host_slices
from plait.runner.profile.trace import Trace, merged

_EXPECTED = "expected"
"""A message that another rank will send: communication where it is waited for, and never hidden."""
_LAYERS = (ASIDE, COMPUTE, (COMMUNICATION, _EXPECTED), ("copies",), ("update",), ("data",))
"""Who is given a moment, in this order."""
_LAYER_OF = {kind: index for index, kinds in enumerate(_LAYERS) for kind in kinds}
_OPERATORS = 40
"""So many are kept, the longest."""
Interval = tuple[float, float, str]


@dataclass(slots=True)
class Use:
    """How often something ran, and how long. Both are of one step, on average."""

    calls: float = 0.0
    ms: float = 0.0


@dataclass(slots=True)
class Operator(Use):
    """An operator of the host or a kernel of the device."""

    name: str = ""
    kind: str = ""


@dataclass(slots=True)
class TimeAccount:
    """One rank's time in a step, on average over the recorded ones."""

    steps: int
    ms: float
    """A step from end to end: from the end of the one before to its own."""
    kinds: dict[str, Use] = field(default_factory=dict)
    """Each moment of the step under one kind; `ms` add up to that of the step."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same milliseconds, by phase and kind."""
    hidden_ms: float = 0.0
    """Messages were under way so long while something was computed."""
    operators: list[Operator] = field(default_factory=list)
    """The longest first."""
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds of arithmetic by module and direction (`forward`, `backward`), without those of its parts."""


@dataclass(slots=True)
class Lanes:
    """A trace cut up: what ran where, and whose each moment is."""

    trace: Trace
    hosts: dict[int, list[Slice]]
    streams: dict[int, list[Slice]]
    moments: list[Interval]
    """The recorded steps from end to end, each moment with its kind."""
    hidden: float

    @property
    def work(self) -> Iterator[Slice]:
        """What computed: on the device, where there is one."""
        lanes = self.streams.values() if self.trace.on_device else [self.hosts[self.trace.main]]
        return (each for lane in lanes for each in lane)


def cut(trace: Trace) -> Lanes:
    """Give each moment of the recorded steps its kind."""
    hosts = host_slices(trace)
    streams = device_slices(trace, hosts)
    moments, hidden = _sweep(_busy(trace, hosts, streams), trace)
    return Lanes(trace, hosts, streams, moments, hidden)


def _busy(trace: Trace, hosts: dict[int, list[Slice]], streams: dict[int, list[Slice]]) -> Iterator[Interval]:
    mine = [each for each in hosts[trace.main] if each.kind not in ASIDE]
    yield from ((span.start, span.end, MARKS[span.name]) for span in trace.asides())
    if trace.on_device:
        yield from ((each.start, each.end, "update") for each in mine if is_update(each.name))
        mine = [each for each in mine if each.kind == "data"]
    else:
        yield from _under_way(trace)
    for thread, slices in hosts.items():
        if thread != trace.main:
            yield from ((each.start, each.end, "update") for each in slices if is_update(each.name))
    for slices in (mine, *streams.values()):
        yield from ((each.start, each.end, each.kind) for each in slices if each.kind is not None)


def _under_way(trace: Trace) -> Iterator[Interval]:
    """When messages were under way on threads of the host."""
    spans = [span for spans in trace.threads.values() for span in spans if is_running_collective(span.name)]
    for start, end in merged((span.start, span.end) for span in spans if not is_between_two(span.name)):
        yield start, end, COMMUNICATION
    # One that was asked for ahead of time is not under way all the while, but nothing else tells who waits for it.
    for start, end in merged((span.start, span.end) for span in spans if span.name.endswith(":recv")):
        yield start, end, _EXPECTED


def _sweep(busy: Iterable[Interval], trace: Trace) -> tuple[list[Interval], float]:
    """See [Note: one kind at every moment]; also how long messages were hidden."""
    start, end = trace.window
    edges: list[tuple[float, int, str]] = [(edge, 0, "") for edge in trace.phases.boundaries() if start < edge < end]
    for begins, ends, kind in busy:
        if begins < end and ends > start:
            edges += [(max(begins, start), 1, kind), (min(ends, end), -1, kind)]
    edges.append((end, 0, ""))
    edges.sort(key=lambda edge: edge[0])
    active: Counter[str] = Counter()
    moments: list[Interval] = []
    hidden, at = 0.0, start
    for moment, change, kind in edges:
        if moment > at:
            chosen = min((each for each in active if active[each]), key=_rank, default=IDLE)
            moments.append((at, moment, COMMUNICATION if chosen == _EXPECTED else chosen))
            if active[COMMUNICATION] and chosen in COMPUTE:
                hidden += moment - at
            at = moment
        if change:
            active[kind] += change
    return moments, hidden


def _rank(kind: str) -> tuple[int, int]:
    return _LAYER_OF[kind], KINDS.index(kind) if kind in KINDS else len(KINDS)


def account_of(lanes: Lanes) -> TimeAccount:
    """Add up the moments by kind, phase, operator and module."""
    trace, steps = lanes.trace, len(lanes.trace.steps)
    start, end = trace.window
    scale = 1e-3 / steps
    found = TimeAccount(steps, (end - start) * scale, hidden_ms=lanes.hidden * scale)
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    for begins, ends, kind in lanes.moments:
        found.kinds.setdefault(kind, Use()).ms += (ends - begins) * scale
        phases[trace.phases.at(begins)][kind] += (ends - begins) * scale  # type: ignore[assignment]
    found.phases = {phase: dict(kinds) for phase, kinds in phases.items()}
    operators: dict[tuple[str, str], Operator] = {}
    for each in lanes.work:
        if each.kind is None or each.kind in MARKS.values() or not start <= each.start < end:
            continue
        use = operators.setdefault((each.name, each.kind), Operator(name=each.name, kind=each.kind))
        use.ms += each.length * scale
        use.calls += each.first / steps
        if each.kind in found.kinds:
            found.kinds[each.kind].calls += each.first / steps
        if each.module is not None and each.kind in COMPUTE and each.kind != "optimizer":
            module = found.modules.setdefault(each.module, {"forward": 0.0, "backward": 0.0})
            module["forward" if each.phase == "forward" else "backward"] += each.length * scale
    found.kinds = {kind: found.kinds[kind] for kind in KINDS if kind in found.kinds}
    found.operators = sorted(operators.values(), key=lambda use: -use.ms)[:_OPERATORS]
    return found
