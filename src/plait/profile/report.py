"""The report of a profile: messages, modules, memory and time, with the figures that are derived from them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.profile.breakdown import TimeBreakdown, Trace, TraceSpan
from plait.profile.count import OUTSIDE, Flops, SentMessage
from plait.profile.marks import is_collective, is_point_to_point, is_running_collective

# The message log: collectives, sends and receives of the counted step, with times from the trace.


_POINT_TO_POINT_OPS = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


@dataclass(slots=True)
class MessageRow:
    """All messages of a step with the same kind, axis, group size and bytes."""

    kind: str
    axis: str
    """The axes of the layout that the group spans."""
    ranks: int
    """The size of the group."""
    bytes: int
    """Bytes of one message."""
    count: int
    sent: float
    """Bytes that this rank sends per step."""
    ms: float | None = None
    """Milliseconds per step, including waiting for the slowest rank; None if the trace does not show them."""

    @property
    def gbps(self) -> float | None:
        """The bus bandwidth: GB that this rank sends per second."""
        return self.sent / self.ms / 1e6 if self.ms else None


@dataclass(slots=True)
class Log:
    """The messages of one rank."""

    rows: list[MessageRow]
    note: str = ""


def message_log(trace: Trace, messages: Sequence[SentMessage]) -> Log:
    """Return the log of the counted messages, with the times of those in the trace, which have the same order."""
    times: list[float | None] | None = None
    steps = [_step_times(trace, window, {message.op for message in messages}) for window in trace.steps]
    names = [message.op for message in messages]
    fitting = [recorded for recorded in steps if [name for name, _ in recorded] == names]
    if fitting:
        columns = zip(*([ms for _, ms in recorded] for recorded in fitting), strict=True)
        times = [None if None in column else sum(ms or 0.0 for ms in column) / len(column) for column in columns]
    rows: dict[tuple[str, str, int, int], MessageRow] = {}
    for index, message in enumerate(messages):
        key = (message.collective, message.axis, message.ranks, message.bytes)
        row = rows.setdefault(key, MessageRow(message.collective, message.axis, message.ranks, message.bytes, 0, 0.0))
        row.count += 1
        row.sent += message.sent
        ms = None if times is None else times[index]
        if ms is not None:
            row.ms = (row.ms or 0.0) + ms
    remark = ""
    if messages and times is None:
        average = sum(map(len, steps)) / max(len(steps), 1)
        remark = f"times are missing: the counted step sent {len(messages)} messages, the recorded ones {average:g}"
    return Log(sorted(rows.values(), key=lambda row: (-(row.ms or 0.0), -row.sent)), remark)


def _step_times(trace: Trace, window: tuple[float, float], wanted: set[str]) -> list[tuple[str, float | None]]:
    """Return the messages of a step in order, each with its milliseconds, where they are known."""
    candidates = [(thread, span) for thread, spans in trace.threads.items() for span in _outermost(spans)]
    between_steps = trace.between_steps()
    issued = [
        (thread, span)
        for thread, span in sorted(candidates, key=lambda item: item[1].start)
        if window[0] <= span.start < window[1]
        and not any(other.start <= span.start < other.end for other in between_steps)
    ]
    run = _on_device(trace, issued) if trace.on_device else _on_host(trace, issued)
    return [(span.name, ms) for (_, span), ms in zip(issued, run, strict=True) if span.name in wanted]


def _outermost(spans: Sequence[TraceSpan]) -> Iterator[TraceSpan]:
    """Yield the communication operators that are not called by another one."""
    until = float("-inf")
    for span in spans:
        if is_collective(span.name) and span.start >= until:
            until = span.end
            yield span


def _on_device(trace: Trace, issued: Sequence[tuple[int, TraceSpan]]) -> Sequence[float | None]:
    """Return the milliseconds of each message: those of the NCCL kernels launched during its operator."""
    times = [0.0] * len(issued)
    by_thread: dict[int, list[int]] = {}
    for index, (thread, _) in enumerate(issued):
        by_thread.setdefault(thread, []).append(index)
    starts = {thread: [issued[index][1].start for index in indices] for thread, indices in by_thread.items()}
    for spans in trace.streams.values():
        for span in spans:
            if not span.name.startswith("nccl"):
                continue
            thread, moment = trace.launches.get(span.args.get("correlation", -1), (-1, 0.0))
            index = bisect_right(starts.get(thread, []), moment) - 1
            if index >= 0 and moment < issued[by_thread[thread][index]][1].end:
                times[by_thread[thread][index]] += (span.end - span.start) * 1e-3
    return times


def _on_host(trace: Trace, issued: Sequence[tuple[int, TraceSpan]]) -> Sequence[float | None]:
    """Return the milliseconds of each message. The backend's threads start messages in the order of their calls.

    None for sends and receives: their spans last until the wait.
    """
    spans = (span for spans in trace.threads.values() for span in spans if is_running_collective(span.name))
    waiting = sorted((span for span in spans if not is_point_to_point(span.name)), key=lambda span: span.start)
    times: list[float | None] = []
    at = 0
    for _, span in issued:
        if span.name in _POINT_TO_POINT_OPS:
            times.append(None)
            continue
        while at < len(waiting) and waiting[at].start < span.start:
            at += 1
        times.append((waiting[at].end - waiting[at].start) * 1e-3 if at < len(waiting) else 0.0)
        at += 1
    return times


# The module tree: time and FLOPs of each module with its submodules, repeated blocks folded into one row.


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(slots=True)
class ModuleRow:
    """Time and FLOPs of one step on one rank: of a module, or of all whose names differ only in an index.

    Submodules are included.
    """

    name: str
    depth: int = 0
    """The number of its ancestors in the table."""
    names: set[str] = field(default_factory=set)
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: Flops = field(default_factory=Flops)

    @property
    def ms(self) -> float:
        """Milliseconds of forward and backward together."""
        return self.forward_ms + self.backward_ms

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs per second; None where nothing was computed or timed."""
        return self.flops.total / self.ms * 1e3 if self.ms and self.flops.total else None


def folded(name: str) -> str:
    """Return `blocks.3.ffn` as `blocks.*.ffn`."""
    return _NUMBER.sub("*", name)


def module_rows(root: str, times: Mapping[str, Mapping[str, float]], flops: Mapping[str, Flops]) -> list[ModuleRow]:
    """Return the rows of the module tree, each parent before its children, siblings by descending time."""
    rows: dict[str, ModuleRow] = {}
    for name in dict.fromkeys([*times, *flops]):
        spent, done = times.get(name, {}), flops.get(name, Flops())
        for path in _with_parents(name, root):
            row = rows.setdefault(folded(path), ModuleRow(folded(path)))
            row.names.add(path)
            row.forward_ms += spent.get("forward", 0.0)
            row.backward_ms += spent.get("backward", 0.0)
            row.flops.forward += done.forward
            row.flops.again += done.again
            row.flops.backward += done.backward
    for parent in [path for path in rows if f"{path}.*" in rows]:
        del rows[parent]  # a `ModuleList` is not called, and would have the same numbers as its blocks
    for name, row in rows.items():
        row.depth = len(_parents(name, rows, root))
    return sorted(rows.values(), key=lambda row: _sort_key(row, rows, root))


def _parents(name: str, rows: Mapping[str, ModuleRow], root: str) -> list[str]:
    """Return the ancestors of a row in the table, from the root."""
    if name in (root, OUTSIDE):
        return []
    components = name.split(".")
    above = (".".join(components[:end]) for end in range(1, len(components)))
    return [*([root] if root in rows else []), *(path for path in above if path in rows)]


def _with_parents(name: str, root: str) -> list[str]:
    if name == OUTSIDE:
        return [OUTSIDE]
    if name == root:
        return [root]
    components = name.split(".")
    return [root, *(".".join(components[: end + 1]) for end in range(len(components)))]


def _sort_key(row: ModuleRow, rows: Mapping[str, ModuleRow], root: str) -> tuple[tuple[float, float, str], ...]:
    """Return the sort key of a row: after its parents, and after siblings with more time."""
    key = [(float(row.name == OUTSIDE), 0.0, "")]
    for name in [*_parents(row.name, rows, root), row.name]:
        if name != root:
            key.append((-rows[name].ms, -float(rows[name].flops.total), name))
    return tuple(key)


@dataclass(slots=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    by_owner: dict[str, int]
    """Category → bytes, in the counted step."""
    counted: int
    """Their sum."""
    measured: int
    """The peak of the device's allocator; on a host, the memory of the process."""
    uncompiled: bool
    """Whether the run is compiled; the counted step was not."""


@dataclass(slots=True)
class RankTime:
    """The time of one rank."""

    rank: int
    ms: float
    kinds: dict[str, float]
    hidden_ms: float
    sent: float
    flops: float


@dataclass(slots=True)
class Report:
    """The profile of rank 0, with the time of every rank."""

    title: str
    device: str
    """The type of the device."""
    device_name: str
    layout: dict[str, int]
    """Sizes of the axes with more than one rank."""
    ranks: list[RankTime]
    first_step: int
    time: TimeBreakdown
    clock_ms: float
    """Milliseconds of a recorded step, by the clock of the host."""
    plain_ms: float | None
    """Milliseconds of a step before the profiler started; None if there were too few steps."""
    modules: list[ModuleRow]
    messages: Log
    memory: Memory
    tokens: int = 0
    """Tokens of one step, over all ranks."""
    formula_flops: float | None = None
    """FLOPs of one step, over all ranks, by the model's `flops_per_token`; None if it has none."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device; None if it is not known."""
    traces: list[str] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step without the profiler if that was measured, else with it."""
        return self.plain_ms or self.time.ms

    @property
    def counted_flops(self) -> float:
        """The FLOPs of one step, over all ranks, with recomputation."""
        return sum(rank.flops for rank in self.ranks)

    @property
    def covered(self) -> float:
        """The sum of all categories as a fraction of the step's time by the clock; 1.0 if they agree."""
        return sum(use.ms for use in self.time.kinds.values()) / self.clock_ms

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's FLOP/s as a fraction of the devices' peak; None if not known."""
        return self._utilization(self.formula_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: the same with all computed FLOPs, including recomputation."""
        return self._utilization(self.counted_flops)

    def _utilization(self, flops: float | None) -> float | None:
        if not flops or self.peak_flops is None:
            return None
        return flops / (self.step_ms * 1e-3 * self.peak_flops * len(self.ranks))

    def summary(self) -> str:
        """Return the profile in one line."""
        longest = sorted(self.time.kinds.items(), key=lambda entry: -entry[1].ms)[:3]
        shares = ", ".join(f"{category} {use.ms / self.time.ms:.0%}" for category, use in longest)
        return f"{self.time.ms:.4g} ms per step ({self.step_ms:.4g} without the profiler): {shares}"

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values, with derived figures."""
        content = asdict(self)
        content["memory"] = {"parts": content["memory"].pop("by_owner"), **content["memory"]}
        for row, entry in zip(self.modules, content["modules"], strict=True):
            entry["count"] = len(entry.pop("names"))
            entry["flops_per_s"] = row.flops_per_s
        for log, entry in zip(self.messages.rows, content["messages"]["rows"], strict=True):
            entry["gbps"] = log.gbps
        content |= {"mfu": self.mfu, "hfu": self.hfu, "counted_flops": self.counted_flops, "covered": self.covered}
        return content


def slowest(ranks: Sequence[RankTime]) -> RankTime | None:
    """Return the rank that the others wait for: the one with the least exposed communication. None for one rank."""
    if len(ranks) < 2:
        return None
    return min(ranks, key=lambda rank: rank.kinds.get("communication", 0.0))
