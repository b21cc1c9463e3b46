"""A report as tables of text: the same ones on a console and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.monitor import compact, size
from plait.runner.profile.kinds import COMMUNICATION, KINDS, label
from plait.runner.profile.report import Report, slowest

_PHASES = ("forward", "backward", "reduce", "step")
_OPERATORS, _MESSAGES, _DEPTH, _RANKS = 14, 12, 4, 16
"""Rows that are shown; the figures in the file have all."""


@dataclass(slots=True)
class Grid:
    """A titled table. The first column is text, the others are figures."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]] = ()
    note: str = ""
    last_is_sum: bool = False


def headline(report: Report) -> list[tuple[str, str, str]]:
    """The figures that are asked for first: what, how much, and a remark."""
    plain = "" if report.plain_ms is None else f"{report.time.ms:.4g} ms with the profiler"
    found = [("Step", f"{report.step_ms:.4g} ms", plain)]
    if report.tokens:
        found.append(("Throughput", compact(report.tokens / report.step_ms * 1e3), "tokens/s, all ranks"))
    if report.counted_flops:
        rate = report.counted_flops / report.step_ms * 1e3 / len(report.ranks)
        found.append(("Arithmetic", compact(rate), "FLOP/s, one rank, with what is recomputed"))
    if report.mfu is not None:
        found.append(("MFU", f"{report.mfu:.1%}", f"of {compact(report.peak_flops or 0.0)} FLOP/s"))
    elif report.hfu is not None:
        found.append(("HFU", f"{report.hfu:.1%}", f"of {compact(report.peak_flops or 0.0)} FLOP/s"))
    found.append(("Peak memory", size(report.memory.measured), "one rank"))
    return found


def grids(report: Report) -> Iterator[Grid]:
    """Every table that has something to say."""
    for grid in (_time(report), _phases(report), _ranks(report), _memory(report), _messages(report)):
        if grid.rows:
            yield grid
    for grid in (_modules(report), _operators(report)):
        if grid.rows:
            yield grid


def _time(report: Report) -> Grid:
    time = report.time
    rows = [
        (label(kind, report.device), f"{use.ms:.3f}", f"{use.ms / time.ms:.1%}", _count(use.calls))
        for kind, use in time.kinds.items()
    ]
    rows.append(("a step", f"{time.ms:.3f}", "100.0%", ""))
    hidden = f"; messages beside arithmetic: {time.hidden_ms:.3f} ms more, hidden" if time.hidden_ms else ""
    note = f"these add up to {report.covered:.1%} of the clock's {report.clock_ms:.3f} ms{hidden}"
    return Grid("Where the time of a step goes", ("", "ms", "share", "calls"), rows, note, last_is_sum=True)


def _phases(report: Report) -> Grid:
    phases = report.time.phases
    used = [kind for kind in KINDS if any(kinds.get(kind) for kinds in phases.values())]
    order = sorted(phases, key=lambda phase: _PHASES.index(phase) if phase in _PHASES else len(_PHASES))
    rows = [
        (
            "between steps" if phase == "idle" else phase,
            *(f"{phases[phase][kind]:.2f}" if phases[phase].get(kind) else "" for kind in used),
            f"{sum(phases[phase].values()):.2f}",
        )
        for phase in order
    ]
    return Grid("By phase, in ms", ("", *used, "all"), rows)


def _ranks(report: Report) -> Grid:
    last = slowest(report.ranks)
    if last is None:
        return Grid("", ())
    used = [kind for kind in KINDS if any(rank.kinds.get(kind) for rank in report.ranks)]
    shown = report.ranks if len(report.ranks) <= _RANKS else sorted(report.ranks, key=lambda rank: -rank.ms)[:_RANKS]
    rows = [
        (
            f"rank {rank.rank}",
            *(f"{rank.kinds.get(kind, 0.0):.2f}" for kind in used),
            f"{rank.hidden_ms:.2f}",
            f"{rank.ms:.2f}",
        )
        for rank in shown
    ]
    waits = [rank.kinds.get(COMMUNICATION, 0.0) for rank in report.ranks]
    note = f"rank {last.rank} waits least, the others up to {max(waits) - min(waits):.2f} ms more"
    return Grid("Ranks, in ms", ("", *used, "hidden", "a step"), rows, note)


def _memory(report: Report) -> Grid:
    memory = report.memory
    rows = [
        (part, size(held), f"{held / max(memory.counted, 1):.1%}")
        for part, held in sorted(memory.parts.items(), key=lambda entry: -entry[1])
    ]
    if not rows:
        return Grid("", ())
    rows.append(("tensors at the peak", size(memory.counted), "100.0%"))
    if report.device == "cpu":
        note = f"the process holds {size(memory.measured)}, with Python and libraries"
    else:
        rest = memory.measured - memory.counted
        more = f"{size(abs(rest))} {'more' if rest >= 0 else 'less'}"
        why = "compiled code, kernels' own" if memory.uncompiled else "kernels' own"
        note = f"the allocator had given out {size(memory.measured)}, {more} ({why})"
    return Grid("Memory of a rank at the peak", ("", "", "share"), rows, note, last_is_sum=True)


def _messages(report: Report) -> Grid:
    log = report.messages
    rows = [
        (
            f"{row.kind} {row.axis}".strip(),
            str(row.ranks),
            size(row.bytes),
            str(row.count),
            size(row.sent),
            "" if row.ms is None else f"{row.ms:.3f}",
            f"{row.gbps:.2f}" if row.gbps and row.gbps >= 0.005 else "",
        )
        for row in log.rows[:_MESSAGES]
    ]
    left = len(log.rows) - len(rows)
    notes = [log.note, f"and {left} more kinds of message" if left > 0 else ""]
    if rows:
        rows.append(
            (
                "all",
                "",
                "",
                str(sum(row.count for row in log.rows)),
                size(sum(row.sent for row in log.rows)),
                f"{sum(row.ms or 0.0 for row in log.rows):.3f}" if any(row.ms for row in log.rows) else "",
                "",
            )
        )
    heads = ("", "ranks", "bytes of one", "a step", "sent a step", "ms", "GB/s")
    note = "; ".join(filter(None, [*notes, "times include waiting for the slowest rank"]))
    return Grid("Messages of a step", heads, rows, note if rows else "", last_is_sum=True)


def _modules(report: Report) -> Grid:
    least = max((row.ms for row in report.modules), default=0.0) * 0.004
    floor = max((row.flops.total for row in report.modules), default=0) * 0.004
    rows: list[tuple[str, ...]] = []
    above: list[str] = []
    for row in report.modules:
        if row.depth > _DEPTH or (row.ms < least and row.flops.total < floor):
            continue
        times = f" ×{len(row.names)}" if len(row.names) > 1 else ""
        above = above[: row.depth]
        name = row.name.removeprefix(f"{above[-1]}.") if above else row.name
        above.append(row.name)
        rows.append(
            (
                f"{'  ' * row.depth}{name}{times}",
                f"{row.forward_ms:.3f}" if row.ms else "",
                f"{row.backward_ms:.3f}" if row.ms else "",
                f"{row.ms / report.time.ms:.1%}" if row.ms else "",
                compact(row.flops.total) if row.flops.total else "",
                compact(row.flops.again) if row.flops.again else "",
                "" if row.flops_per_s is None else compact(row.flops_per_s),
            )
        )
    heads = ("", "forward ms", "backward ms", "share", "FLOPs", "of these again", "FLOP/s")
    notes = [f"all ranks: {compact(report.counted_flops)} FLOPs counted"] if report.counted_flops else []
    if report.formula_flops and notes:
        share = report.counted_flops / report.formula_flops
        notes.append(f"{compact(report.formula_flops)} by the model's own formula ({share:.1%})")
    return Grid("Modules, with what is inside of them", heads, rows, ", ".join(notes))


def _operators(report: Report) -> Grid:
    rows = [
        (_short(use.name), use.kind, f"{use.ms:.3f}", f"{use.ms / report.time.ms:.1%}", _count(use.calls))
        for use in report.time.operators[:_OPERATORS]
    ]
    what = "Operators" if report.device == "cpu" else "Kernels"
    return Grid(f"{what} that take longest", ("", "kind", "ms", "share", "calls"), rows)


def _short(name: str, width: int = 68) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _count(calls: float) -> str:
    return f"{calls:,.0f}" if calls else ""
