"""One recorded step as a picture: whose each moment is, the phases, and what ran on every lane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from xml.sax.saxutils import escape

from plait.monitor import ticks
from plait.runner.profile.account import Interval, Lanes
from plait.runner.profile.kinds import COMMUNICATION, IDLE, is_running_collective, label
from plait.runner.profile.slices import Slice

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
_PHASES = MappingProxyType({"forward": "#9db8de", "backward": "#e2ba8f", "reduce": "#dd9aa4", "step": "#dcc58d"})
_MODULES = ("#7fb3d5", "#a9cce3")
_WIDTH, _LEFT, _RIGHT, _LANE, _GAP, _TOP = 1080, 118, 28, 26, 8, 26
_NARROW = 0.4
"""Boxes of fewer pixels are drawn together with those beside them."""
Box = tuple[float, float, str, str]
"""Start, end, colour, words."""


def draw_step(lanes: Lanes) -> str:
    """The recorded step of middle length as one SVG."""
    steps = sorted(lanes.trace.steps, key=lambda step: step[1] - step[0])
    start, end = steps[len(steps) // 2]
    rows = [(name, list(_narrowed(boxes, start, end))) for name, boxes in _lanes(lanes)]
    rows = [(name, boxes) for name, boxes in rows if boxes]
    height = _TOP + len(rows) * (_LANE + _GAP) + 30
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="one step: its phases, and what ran when" font-family="sans-serif" font-size="12">'
    ]
    parts += _axis(start, end, height)
    for index, (name, boxes) in enumerate(rows):
        top = _TOP + index * (_LANE + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end" fill="#80838a">{escape(name)}</text>')
        parts += [_box(each, start, end, top) for each in boxes]
    return "\n".join([*parts, "</svg>"])


def legend(lanes: Lanes) -> str:
    """What the colours mean, as HTML."""
    device = "cuda" if lanes.trace.on_device else "cpu"
    found = {kind for _, _, kind in lanes.moments} | {each.kind for each in lanes.work if each.kind}
    return "".join(
        f'<li><svg viewBox="0 0 26 10"><rect width="26" height="10" rx="2" fill="{colour}"/></svg>'
        f"{escape(label(kind, device))}</li>"
        for kind, colour in COLOURS.items()
        if kind in found
    )


def _lanes(lanes: Lanes) -> Iterator[tuple[str, Iterable[Box]]]:
    trace = lanes.trace
    yield "whose time", _kinds(lanes.moments)
    yield "phase", _phases(lanes)
    start, end = trace.window
    yield "module", _modules(sorted(lanes.work, key=lambda each: each.start), (end - start) / len(trace.steps) / 300)
    yield "host", (_slice_box(each) for each in lanes.hosts[trace.main] if each.kind is not None)
    for stream, slices in sorted(lanes.streams.items()):
        yield f"stream {stream}", (_slice_box(each) for each in slices)
    for thread, spans in sorted(trace.threads.items()):
        running = [span for span in spans if is_running_collective(span.name) and not span.name.endswith(":send")]
        yield "messages", ((each.start, each.end, COLOURS[COMMUNICATION], each.name) for each in running)
        if thread != trace.main:
            yield "other thread", (_slice_box(each) for each in lanes.hosts[thread] if each.kind is not None)


def _kinds(moments: Sequence[Interval]) -> Iterator[Box]:
    return ((start, end, COLOURS[kind], kind) for start, end, kind in moments)


def _slice_box(each: Slice) -> Box:
    return each.start, each.end, COLOURS[each.kind or IDLE], each.name


def _phases(lanes: Lanes) -> Iterator[Box]:
    told = ((start, end, lanes.trace.phases.at(start)) for start, end, _ in lanes.moments)
    return ((start, end, _PHASES[phase], phase) for start, end, phase in told if phase in _PHASES)


def _modules(slices: Sequence[Slice], patience: float) -> Iterator[Box]:
    """The blocks that are worked on, one after another; one that rests longer than `patience` begins anew."""
    open_at: Slice | None = None
    name, end, turn = "", 0.0, 0
    for each in slices:
        if each.module is None:
            continue
        block = ".".join(each.module.split(".")[:2])
        if open_at is not None and block == name and each.start - end < patience:
            end = max(end, each.end)
            continue
        if open_at is not None:
            yield open_at.start, end, _MODULES[turn % 2], name
            turn += 1
        open_at, name, end = each, block, each.end
    if open_at is not None:
        yield open_at.start, end, _MODULES[turn % 2], name


def _narrowed(boxes: Iterable[Box], start: float, end: float) -> Iterator[Box]:
    """The boxes within the step; what is too narrow to see grows into its neighbour of the same colour."""
    pixel = (end - start) / (_WIDTH - _LEFT - _RIGHT)
    held: Box | None = None
    for begins, ends, colour, words in boxes:
        begins, ends = max(begins, start), min(ends, end)
        if ends <= begins:
            continue
        if held is not None and held[2] == colour and begins - held[1] < pixel * _NARROW:
            words = held[3] if held[3] == words else f"{held[3].removesuffix(', …')}, …"
            held = (held[0], max(held[1], ends), colour, words)
            continue
        if held is not None and held[1] - held[0] >= pixel * _NARROW:
            yield held
        held = (begins, ends, colour, words)
    if held is not None and held[1] - held[0] >= pixel * _NARROW:
        yield held


def _box(box: Box, start: float, end: float, top: int) -> str:
    begins, ends, colour, words = box
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    x, width = _LEFT + (begins - start) * scale, max((ends - begins) * scale, 0.5)
    title = f"{words}: {(ends - begins) * 1e-3:.3f} ms, from {(begins - start) * 1e-3:.3f} ms"
    text = ""
    if width > 7 * len(words):
        ink = "#222" if colour in (*_PHASES.values(), *_MODULES, COLOURS[IDLE]) else "#fff"
        place = f'x="{x + width / 2:.1f}" y="{top + 17}" text-anchor="middle"'
        text = f'<text {place} style="fill: {ink}">{escape(words)}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}" '
        f'fill="{colour}"/>{text}</g>'
    )


def _axis(start: float, end: float, height: int) -> Iterator[str]:
    length = (end - start) * 1e-3
    for value in ticks(0.0, length, 10):
        x = _LEFT + value / length * (_WIDTH - _LEFT - _RIGHT)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 24}" stroke="#8884"/>'
        yield f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#80838a">{value:g} ms</text>'
