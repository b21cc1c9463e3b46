"""The log of messages: those of one counted step, with the times that a trace has for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.runner.profile.count import Sent
from plait.runner.profile.kinds import is_between_two, is_collective, is_running_collective
from plait.runner.profile.trace import Span, Trace

_BETWEEN_TWO = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


@dataclass(slots=True)
class Row:
    """All messages of a step that are alike."""

    kind: str
    axis: str
    """The axes of the layout that they go along."""
    ranks: int
    """So many take part in one."""
    bytes: int
    """Of one."""
    count: int
    sent: float
    """Bytes that leave this rank in a step."""
    ms: float | None = None
    """In a step, until the slowest rank was through; None where the trace does not tell one message from others."""

    @property
    def gbps(self) -> float | None:
        """What leaves this rank in a second, in GB: the bus bandwidth."""
        return self.sent / self.ms / 1e6 if self.ms else None


@dataclass(slots=True)
class Log:
    """The messages of one rank."""

    rows: list[Row]
    note: str = ""


def message_log(trace: Trace, messages: Sequence[Sent]) -> Log:
    """Bring the counted messages and the timed ones together; they come in the same order in every step."""
    times: list[float | None] | None = None
    steps = [_step_times(trace, window, {message.op for message in messages}) for window in trace.steps]
    names = [message.op for message in messages]
    fitting = [found for found in steps if [name for name, _ in found] == names]
    if fitting:
        columns = zip(*([ms for _, ms in found] for found in fitting), strict=True)
        times = [None if None in column else sum(ms or 0.0 for ms in column) / len(column) for column in columns]
    rows: dict[tuple[str, str, int, int], Row] = {}
    for index, message in enumerate(messages):
        key = (message.kind, message.axis, message.ranks, message.bytes)
        row = rows.setdefault(key, Row(message.kind, message.axis, message.ranks, message.bytes, 0, 0.0))
        row.count += 1
        row.sent += message.sent
        ms = None if times is None else times[index]
        if ms is not None:
            row.ms = (row.ms or 0.0) + ms
    note = ""
    if messages and times is None:
        found = sum(len(each) for each in steps) / max(len(steps), 1)
        note = f"times are missing: the counted step sent {len(messages)} messages, the recorded ones {found:g}"
    return Log(sorted(rows.values(), key=lambda row: (-(row.ms or 0.0), -row.sent)), note)


def _step_times(trace: Trace, window: tuple[float, float], wanted: set[str]) -> list[tuple[str, float | None]]:
    """The messages that a step began, in order, and how many milliseconds each was under way, where that is known."""
    found = [(thread, span) for thread, spans in trace.threads.items() for span in _outermost(spans)]
    asides = trace.asides()
    issued = [
        (thread, span)
        for thread, span in sorted(found, key=lambda each: each[1].start)
        if window[0] <= span.start < window[1] and not any(aside.start <= span.start < aside.end for aside in asides)
    ]
    run = _on_device(trace, issued) if trace.on_device else _on_host(trace, issued)
    return [(span.name, ms) for (_, span), ms in zip(issued, run, strict=True) if span.name in wanted]


def _outermost(spans: Sequence[Span]) -> Iterator[Span]:
    """The operators that send something and are not part of one that does."""
    until = float("-inf")
    for span in spans:
        if is_collective(span.name) and span.start >= until:
            until = span.end
            yield span


def _on_device(trace: Trace, issued: Sequence[tuple[int, Span]]) -> Sequence[float | None]:
    """By the operator during which a kernel was launched."""
    times = [0.0] * len(issued)
    by_thread: dict[int, list[int]] = {}
    for index, (thread, _) in enumerate(issued):
        by_thread.setdefault(thread, []).append(index)
    starts = {thread: [issued[index][1].start for index in found] for thread, found in by_thread.items()}
    for spans in trace.streams.values():
        for span in spans:
            if not span.name.startswith("nccl"):
                continue
            thread, moment = trace.launches.get(span.args.get("correlation", -1), (-1, 0.0))
            place = bisect_right(starts.get(thread, []), moment) - 1
            if place >= 0 and moment < issued[by_thread[thread][place]][1].end:
                times[by_thread[thread][place]] += (span.end - span.start) * 1e-3
    return times


def _on_host(trace: Trace, issued: Sequence[tuple[int, Span]]) -> Sequence[float | None]:
    """A backend's threads begin messages in the order in which they were handed over.

    One between two ranks shows as long as nobody has waited for it, which says nothing.
    """
    spans = (span for spans in trace.threads.values() for span in spans if is_running_collective(span.name))
    waiting = sorted((span for span in spans if not is_between_two(span.name)), key=lambda span: span.start)
    times: list[float | None] = []
    at = 0
    for _, span in issued:
        if span.name in _BETWEEN_TWO:
            times.append(None)
            continue
        while at < len(waiting) and waiting[at].start < span.start:
            at += 1
        times.append((waiting[at].end - waiting[at].start) * 1e-3 if at < len(waiting) else 0.0)
        at += 1
    return times
