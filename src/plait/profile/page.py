"""The page of a profile: one self-contained HTML file with the tables and a timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from xml.sax.saxutils import escape

from plait.monitor import format_bytes, format_count, ticks
from plait.monitor import report as page
from plait.profile.breakdown import Interval, Slice, Timeline
from plait.profile.marks import CATEGORIES, COMMUNICATION, IDLE, is_running_collective, label
from plait.profile.report import Report, slowest

# The timeline of one recorded step: categories, phases, modules, and the operators of every thread and stream.


COLOURS = MappingProxyType(
    {
        "matmul": "#3f74c4",
        "attention": "#7d55c7",
        "elementwise": "#3aa17e",
        "optimizer": "#c78f2a",
        "packing": "#d9a5b3",
        COMMUNICATION: "#d1495b",
        "copies": "#e07b39",
        "update": "#a8792b",
        "data": "#8d99ae",
        "evaluate": "#5c677d",
        "save": "#33415c",
        IDLE: "#c9c9c4",
    }
)
_PHASE_COLOURS = MappingProxyType({"forward": "#9db8de", "backward": "#e2ba8f", "reduce": "#dd9aa4", "step": "#dcc58d"})
_MODULES = ("#7fb3d5", "#a9cce3")
_WIDTH, _LEFT, _RIGHT, _ROW, _GAP, _TOP = 1080, 118, 28, 26, 8, 26
_NARROW = 0.4
"""Boxes narrower than this, in pixels, are merged with their neighbours."""
Box = tuple[float, float, str, str]
"""Start, end, colour, title."""


def draw_step(timeline: Timeline) -> str:
    """Return the recorded step of median length as one SVG."""
    steps = sorted(timeline.trace.steps, key=lambda step: step[1] - step[0])
    start, end = steps[len(steps) // 2]
    rows = [(name, list(_narrowed(boxes, start, end))) for name, boxes in _rows(timeline)]
    rows = [(name, boxes) for name, boxes in rows if boxes]
    height = _TOP + len(rows) * (_ROW + _GAP) + 30
    elements = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="one step: its phases, and what ran when" font-family="sans-serif" font-size="12">'
    ]
    elements += _axis(start, end, height)
    for index, (name, boxes) in enumerate(rows):
        top = _TOP + index * (_ROW + _GAP)
        elements.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end" fill="#80838a">{escape(name)}</text>')
        elements += [_box(box, start, end, top) for box in boxes]
    return "\n".join([*elements, "</svg>"])


def legend(timeline: Timeline) -> str:
    """Return the legend of the colours, as HTML."""
    device = "cuda" if timeline.trace.on_device else "cpu"
    shown = {category for _, _, category in timeline.moments} | {
        piece.category for piece in timeline.work if piece.category
    }
    return "".join(
        f'<li><svg viewBox="0 0 26 10"><rect width="26" height="10" rx="2" fill="{colour}"/></svg>'
        f"{escape(label(category, device))}</li>"
        for category, colour in COLOURS.items()
        if category in shown
    )


def _rows(timeline: Timeline) -> Iterator[tuple[str, Iterable[Box]]]:
    trace = timeline.trace
    yield "whose time", _category_boxes(timeline.moments)
    yield "phase", _phase_boxes(timeline)
    start, end = trace.window
    yield (
        "module",
        _module_boxes(sorted(timeline.work, key=lambda piece: piece.start), (end - start) / len(trace.steps) / 300),
    )
    yield "host", (_slice_box(piece) for piece in timeline.hosts[trace.main] if piece.category is not None)
    for stream, slices in sorted(timeline.streams.items()):
        yield f"stream {stream}", (_slice_box(piece) for piece in slices)
    for thread, spans in sorted(trace.threads.items()):
        running = [span for span in spans if is_running_collective(span.name) and not span.name.endswith(":send")]
        yield "messages", ((piece.start, piece.end, COLOURS[COMMUNICATION], piece.name) for piece in running)
        if thread != trace.main:
            yield "other thread", (_slice_box(piece) for piece in timeline.hosts[thread] if piece.category is not None)


def _category_boxes(moments: Sequence[Interval]) -> Iterator[Box]:
    return ((start, end, COLOURS[category], category) for start, end, category in moments)


def _slice_box(piece: Slice) -> Box:
    return piece.start, piece.end, COLOURS[piece.category or IDLE], piece.name


def _phase_boxes(timeline: Timeline) -> Iterator[Box]:
    phases = ((start, end, timeline.trace.phases.at(start)) for start, end, _ in timeline.moments)
    return ((start, end, _PHASE_COLOURS[phase], phase) for start, end, phase in phases if phase in _PHASE_COLOURS)


def _module_boxes(slices: Sequence[Slice], longest_gap: float) -> Iterator[Box]:
    """Yield the running blocks, one after another; a gap longer than `longest_gap` starts a new box."""
    open_at: Slice | None = None
    name, end, turn = "", 0.0, 0
    for piece in slices:
        if piece.module is None:
            continue
        block = ".".join(piece.module.split(".")[:2])
        if open_at is not None and block == name and piece.start - end < longest_gap:
            end = max(end, piece.end)
            continue
        if open_at is not None:
            yield open_at.start, end, _MODULES[turn % 2], name
            turn += 1
        open_at, name, end = piece, block, piece.end
    if open_at is not None:
        yield open_at.start, end, _MODULES[turn % 2], name


def _narrowed(boxes: Iterable[Box], start: float, end: float) -> Iterator[Box]:
    """Yield the boxes within the step; a box too narrow to see is merged with its neighbour of the same colour."""
    pixel = (end - start) / (_WIDTH - _LEFT - _RIGHT)
    held: Box | None = None
    for begins, stop, colour, title in boxes:
        begins, stop = max(begins, start), min(stop, end)
        if stop <= begins:
            continue
        if held is not None and held[2] == colour and begins - held[1] < pixel * _NARROW:
            title = held[3] if held[3] == title else f"{held[3].removesuffix(', …')}, …"
            held = (held[0], max(held[1], stop), colour, title)
            continue
        if held is not None and held[1] - held[0] >= pixel * _NARROW:
            yield held
        held = (begins, stop, colour, title)
    if held is not None and held[1] - held[0] >= pixel * _NARROW:
        yield held


def _box(box: Box, start: float, end: float, top: int) -> str:
    begins, stop, colour, title = box
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    x, width = _LEFT + (begins - start) * scale, max((stop - begins) * scale, 0.5)
    tooltip = f"{title}: {(stop - begins) * 1e-3:.3f} ms, from {(begins - start) * 1e-3:.3f} ms"
    text = ""
    if width > 7 * len(title):
        ink = "#222" if colour in (*_PHASE_COLOURS.values(), *_MODULES, COLOURS[IDLE]) else "#fff"
        anchor = f'x="{x + width / 2:.1f}" y="{top + 17}" text-anchor="middle"'
        text = f'<text {anchor} style="fill: {ink}">{escape(title)}</text>'
    return (
        f'<g><title>{escape(tooltip)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{colour}"/>{text}</g>'
    )


def _axis(start: float, end: float, height: int) -> Iterator[str]:
    length = (end - start) * 1e-3
    for value in ticks(0.0, length, 10):
        x = _LEFT + value / length * (_WIDTH - _LEFT - _RIGHT)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 24}" stroke="#8884"/>'
        yield f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#80838a">{value:g} ms</text>'


# The tables of a report, for console and page.


_PHASE_ORDER = ("forward", "backward", "reduce", "step")
_OPERATORS, _MESSAGES, _DEPTH, _RANKS = 14, 12, 4, 16
"""Limits of the rows that are shown; the JSON file has all."""


@dataclass(slots=True)
class Grid:
    """A titled table. The first column is text, the others are numbers."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]] = ()
    remark: str = ""
    last_is_sum: bool = False


def headline(report: Report) -> list[tuple[str, str, str]]:
    """Return the most important figures: label, value and remark."""
    plain = "" if report.plain_ms is None else f"{report.time.ms:.4g} ms with the profiler"
    figures = [("Step", f"{report.step_ms:.4g} ms", plain)]
    if report.tokens:
        figures.append(("Throughput", format_count(report.tokens / report.step_ms * 1e3), "tokens/s, all ranks"))
    if report.counted_flops:
        rate = report.counted_flops / report.step_ms * 1e3 / len(report.ranks)
        figures.append(("Arithmetic", format_count(rate), "FLOP/s, one rank, with what is recomputed"))
    if report.mfu is not None:
        figures.append(("MFU", f"{report.mfu:.1%}", f"of {format_count(report.peak_flops or 0.0)} FLOP/s"))
    elif report.hfu is not None:
        figures.append(("HFU", f"{report.hfu:.1%}", f"of {format_count(report.peak_flops or 0.0)} FLOP/s"))
    figures.append(("Peak memory", format_bytes(report.memory.measured), "one rank"))
    return figures


def grids(report: Report) -> Iterator[Grid]:
    """Yield every table that has rows."""
    for make in (_time, _phases, _ranks, _memory, _messages, _modules, _operators):
        if (grid := make(report)).rows:
            yield grid


def _time(report: Report) -> Grid:
    time = report.time
    rows = [
        (label(category, report.device), f"{use.ms:.3f}", f"{use.ms / time.ms:.1%}", _count(use.calls))
        for category, use in time.kinds.items()
    ]
    rows.append(("whole step", f"{time.ms:.3f}", "100.0%", ""))
    hidden = f"; messages beside arithmetic: {time.hidden_ms:.3f} ms more, hidden" if time.hidden_ms else ""
    remark = f"these add up to {report.covered:.1%} of the clock's {report.clock_ms:.3f} ms{hidden}"
    return Grid("Where the time of a step goes", ("", "ms", "share", "calls"), rows, remark, last_is_sum=True)


def _phases(report: Report) -> Grid:
    phases = report.time.phases
    used = [category for category in CATEGORIES if any(milliseconds.get(category) for milliseconds in phases.values())]
    order = sorted(phases, key=lambda phase: _PHASE_ORDER.index(phase) if phase in _PHASE_ORDER else len(_PHASE_ORDER))
    rows = [
        (
            "between steps" if phase == "idle" else phase,
            *(f"{phases[phase][category]:.2f}" if phases[phase].get(category) else "" for category in used),
            f"{sum(phases[phase].values()):.2f}",
        )
        for phase in order
    ]
    return Grid("By phase, in ms", ("", *used, "all"), rows)


def _ranks(report: Report) -> Grid:
    last = slowest(report.ranks)
    if last is None:
        return Grid("", ())
    used = [category for category in CATEGORIES if any(rank.kinds.get(category) for rank in report.ranks)]
    shown = report.ranks if len(report.ranks) <= _RANKS else sorted(report.ranks, key=lambda rank: -rank.ms)[:_RANKS]
    rows = [
        (
            f"rank {rank.rank}",
            *(f"{rank.kinds.get(category, 0.0):.2f}" for category in used),
            f"{rank.hidden_ms:.2f}",
            f"{rank.ms:.2f}",
        )
        for rank in shown
    ]
    waits = [rank.kinds.get(COMMUNICATION, 0.0) for rank in report.ranks]
    remark = f"rank {last.rank} waits least, the others up to {max(waits) - min(waits):.2f} ms more"
    return Grid("Ranks, in ms", ("", *used, "hidden", "whole step"), rows, remark)


def _memory(report: Report) -> Grid:
    memory = report.memory
    rows = [
        (owner, format_bytes(held), f"{held / max(memory.counted, 1):.1%}")
        for owner, held in sorted(memory.by_owner.items(), key=lambda entry: -entry[1])
    ]
    if not rows:
        return Grid("", ())
    rows.append(("tensors at the peak", format_bytes(memory.counted), "100.0%"))
    if report.device == "cpu":
        remark = f"the process holds {format_bytes(memory.measured)}, with Python and libraries"
    else:
        rest = memory.measured - memory.counted
        more = f"{format_bytes(abs(rest))} {'more' if rest >= 0 else 'less'}"
        why = "compiled code, kernels' own" if memory.uncompiled else "kernels' own"
        remark = f"the allocator had given out {format_bytes(memory.measured)}, {more} ({why})"
    return Grid("Memory of a rank at the peak", ("", "", "share"), rows, remark, last_is_sum=True)


def _messages(report: Report) -> Grid:
    log = report.messages
    rows = [
        (
            f"{row.kind} {row.axis}".strip(),
            str(row.ranks),
            format_bytes(row.bytes),
            str(row.count),
            format_bytes(row.sent),
            "" if row.ms is None else f"{row.ms:.3f}",
            f"{row.gbps:.2f}" if row.gbps and row.gbps >= 0.005 else "",
        )
        for row in log.rows[:_MESSAGES]
    ]
    left = len(log.rows) - len(rows)
    remarks = [log.note, f"and {left} more kinds of message" if left > 0 else ""]
    if rows:
        rows.append(
            (
                "all",
                "",
                "",
                str(sum(row.count for row in log.rows)),
                format_bytes(sum(row.sent for row in log.rows)),
                f"{sum(row.ms or 0.0 for row in log.rows):.3f}" if any(row.ms for row in log.rows) else "",
                "",
            )
        )
    heads = ("", "ranks", "bytes of one", "per step", "sent per step", "ms", "GB/s")
    remark = "; ".join(filter(None, [*remarks, "times include waiting for the slowest rank"]))
    return Grid("Messages of a step", heads, rows, remark if rows else "", last_is_sum=True)


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
                format_count(row.flops.total) if row.flops.total else "",
                format_count(row.flops.again) if row.flops.again else "",
                "" if row.flops_per_s is None else format_count(row.flops_per_s),
            )
        )
    heads = ("", "forward ms", "backward ms", "share", "FLOPs", "of these again", "FLOP/s")
    remarks = [f"all ranks: {format_count(report.counted_flops)} FLOPs counted"] if report.counted_flops else []
    if report.formula_flops and remarks:
        share = report.counted_flops / report.formula_flops
        remarks.append(f"{format_count(report.formula_flops)} by the model's own formula ({share:.1%})")
    return Grid("Modules, with what is inside of them", heads, rows, ", ".join(remarks))


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


def write_page(report: Report, timeline: Timeline, folder: Path) -> None:
    """Write `profile.html`, and the timeline as `step.svg`."""
    picture = draw_step(timeline)
    (folder / "step.svg").write_text(f"{picture}\n", encoding="utf-8")
    body = [
        _header(report),
        page.fact_list(headline(report)),
        page.card(
            "One step",
            f'<div class="wide">{picture}</div><ul class="legend">{legend(timeline)}</ul>',
            "the recorded one of median length, rank 0",
        ),
        *(page.card(grid.title, _table(grid), grid.remark) for grid in grids(report)),
        page.card("Traces", _traces(report), "for chrome://tracing or ui.perfetto.dev"),
        page.footer(time.time()),
    ]
    (folder / "profile.html").write_text(page.document(f"Profile of {report.title}", body), encoding="utf-8")


def _header(report: Report) -> str:
    axes = ", ".join(f"{axis} {length}" for axis, length in report.layout.items())
    where = f"{len(report.ranks)} × {report.device_name}{f' ({axes})' if axes else ''}"
    last = report.first_step + report.time.steps - 1
    facts = "".join(f"<span>{page.escaped(fact)}</span>" for fact in (where, f"steps {report.first_step} to {last}"))
    return page.page_header("Profile", report.title, facts)


def _table(grid: Grid) -> str:
    names = [page.escaped(heading) for heading in grid.heads]
    head = f"<th>{names[0]}</th>" + "".join(f'<th class="n">{name}</th>' for name in names[1:])
    rows = []
    for number, row in enumerate(grid.rows):
        mark = ' class="differs"' if grid.last_is_sum and number == len(grid.rows) - 1 else ""
        inset = (len(row[0]) - len(row[0].lstrip())) * 0.6
        first = f'<td style="padding-left: {inset:g}em">{page.escaped(row[0].strip())}</td>'
        cells = "".join(f'<td class="n">{page.escaped(cell)}</td>' for cell in row[1:])
        rows.append(f"<tr{mark}>{first}{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _traces(report: Report) -> str:
    links = ", ".join(f'<a href="{page.escaped(name)}"><code>{page.escaped(name)}</code></a>' for name in report.traces)
    return f"<p>{links}</p>" if links else ""
