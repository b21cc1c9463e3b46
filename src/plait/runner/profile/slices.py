"""The innermost operator at every moment of a thread, with the module and the phase that it works for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.runner.profile.kinds import (
    COMMUNICATION,
    COMPILED,
    MARKS,
    MODULE,
    is_running_collective,
    kind_of_kernel,
    kind_of_op,
)
from plait.runner.profile.trace import Span, Trace

_STICKY = ("matmul", "attention", "packing", COMMUNICATION, "data", "evaluate", "save")
"""What is inside one of these, belongs to it."""
_PHASES_OF_UPDATE = ("step",)


class Slice(NamedTuple):
    """A stretch of time with one owner."""

    start: float
    end: float
    kind: str | None
    """None: nothing is computed."""
    name: str
    module: str | None
    phase: str
    first: bool
    """Whether it begins its operator; the others go on with it after a child."""

    @property
    def length(self) -> float:
        """In microseconds."""
        return self.end - self.start


@dataclass(slots=True)
class _Frame:
    """An operator that has begun and not ended."""

    end: float
    cursor: float
    name: str
    kind: str | None
    inside: str | None
    """The kind of everything in it; None: each operator's own."""
    module: str | None
    back: bool
    first: bool = True


def host_slices(trace: Trace) -> dict[int, list[Slice]]:
    """The slices of every thread. The thread that trains comes first: backward operators look up its modules."""
    owners: dict[int, str | None] = {}
    order = sorted(trace.threads, key=lambda thread: thread != trace.main)
    return {thread: list(_flatten(trace.threads[thread], trace, owners)) for thread in order}


def _flatten(spans: Sequence[Span], trace: Trace, owners: dict[int, str | None]) -> Iterator[Slice]:
    stack: list[_Frame] = []
    for span in spans:
        if is_running_collective(span.name):
            continue  # it is under way beside the thread, and outlasts what the thread does
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
    """What of a frame has passed since its last child."""
    end = frame.end if until is None else until
    if end > frame.cursor or (until is None and frame.first):
        phase = trace.phases.at(frame.cursor)
        kind = frame.kind
        if kind is not None and phase in _PHASES_OF_UPDATE and kind not in (COMMUNICATION, *MARKS.values()):
            kind = "optimizer"
        yield Slice(frame.cursor, max(end, frame.cursor), kind, frame.name, frame.module, phase, frame.first)
        frame.first = False
        frame.cursor = max(end, frame.cursor)


def _frame(span: Span, end: float, parent: _Frame | None, owners: dict[int, str | None]) -> _Frame:
    above, module, back = (None, None, False) if parent is None else (parent.inside, parent.module, parent.back)
    name = span.name
    if name.startswith("autograd::engine::evaluate_function"):
        module, back = None, True
    if name.startswith(MODULE):
        module = name.removeprefix(MODULE)
    number = span.args.get("Sequence number")
    if number is not None:
        # The number of the node in the graph: the last operator that saw it on the way forward made the node.
        if not back:
            owners[number] = module
        elif module is None:
            module = owners.get(number)
    kind = MARKS.get(name) or kind_of_op(name)
    if above is not None and (kind != COMMUNICATION or above in MARKS.values()):
        kind = above
    inside = kind if kind in _STICKY else None
    if span.category == "user_annotation" and kind not in MARKS.values() and not name.startswith(COMPILED):
        kind = None  # it computes nothing itself
    return _Frame(end, span.start, name, kind, inside, module, back)


def device_slices(trace: Trace, hosts: dict[int, list[Slice]]) -> dict[int, list[Slice]]:
    """What ran on each stream of the device, for the module and the phase of the operator that launched it."""
    starts = {thread: [each.start for each in slices] for thread, slices in hosts.items()}

    def launched(span: Span) -> Slice | None:
        thread, moment = trace.launches.get(span.args.get("correlation", -1), (-1, 0.0))
        index = bisect_right(starts.get(thread, []), moment) - 1
        found = hosts[thread][index] if index >= 0 else None
        return found if found is not None and moment < found.end else None

    return {stream: [_on_device(span, launched(span)) for span in spans] for stream, spans in trace.streams.items()}


def _on_device(span: Span, source: Slice | None) -> Slice:
    kind = kind_of_kernel(span.name, span.category)
    phase, module = ("idle", None) if source is None else (source.phase, source.module)
    if kind not in (COMMUNICATION, "copies") and source is not None:
        if phase in _PHASES_OF_UPDATE:
            kind = "optimizer"
        elif source.kind in _STICKY and source.kind != COMMUNICATION:
            kind = source.kind
    return Slice(span.start, span.end, kind, span.name, module, phase, first=True)
