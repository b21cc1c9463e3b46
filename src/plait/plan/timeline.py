"""A run's memory as a picture: operation by operation, phase by phase, against what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from plait.plan.plan import GIB, Plan, RankPlan
from plait.spec import Phase

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 260, 60, 34, 40
_COLOURS = {
    Phase.BUILD: "#9d755d",
    Phase.LOAD: "#72b7b2",
    Phase.INIT: "#ff9da6",
    Phase.FORWARD: "#4c78a8",
    Phase.BACKWARD: "#f58518",
    Phase.REDUCE: "#54a24b",
    Phase.STEP: "#b279a2",
    Phase.SAVE: "#e45756",
}
"""In the order in which they come."""
_POINTS = 800
"""At most so many points are drawn; of those between two, the highest."""


def draw_timeline(plan: Plan) -> str:
    """An SVG with one chart for each rank of the plan, which must be `exact`."""
    charts = [_chart(rank, plan, index * (_HEIGHT + 20)) for index, rank in enumerate(plan.ranks)]
    height = len(charts) * (_HEIGHT + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="12">', *charts, "</svg>\n"])


def _chart(rank: RankPlan, plan: Plan, down: int) -> str:
    trail = _thinned([(phase, size) for phase, size in rank.trail if phase in _COLOURS])
    limit = (plan.hardware.memory_gib - plan.hardware.context_gib) * GIB
    highest = max(size for _, size in trail)
    top = max(highest * 1.1, limit if limit < 2 * highest else 0)
    inner = _HEIGHT - _TOP - _BOTTOM

    def x(index: float) -> float:
        return _LEFT + index * (_WIDTH - _LEFT - 20) / len(trail)

    def y(size: float) -> float:
        return down + _TOP + inner * (1 - size / top)

    title = f"{rank.name}: {highest / GIB:.2f} GiB of tensors at the peak, {limit / GIB:.1f} GiB there"
    lines = [f'<text x="{_LEFT}" y="{down + 18}" font-weight="bold">{escape(title)}</text>']
    start = 0
    for phase, group in groupby(trail, key=lambda point: point[0]):
        sizes = [size for _, size in group]
        points = [f"{x(start + index):.1f},{y(size):.1f}" for index, size in enumerate([*sizes, sizes[-1]])]
        edge = f"{x(start + len(sizes)):.1f},{y(0):.1f} {x(start):.1f},{y(0):.1f}"
        lines.append(f'<polygon points="{" ".join(points)} {edge}" fill="{_COLOURS[phase]}" fill-opacity="0.75"/>')
        start += len(sizes)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = y(share * top)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#8884"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{share * top / GIB:.1f}</text>')
    if limit <= top:
        level = y(limit)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#c00"/>')
    for index, (phase, colour) in enumerate(_COLOURS.items()):
        place, row = _LEFT + index * 98, down + _HEIGHT - 12
        lines.append(f'<rect x="{place}" y="{row - 10}" width="11" height="11" fill="{colour}"/>')
        lines.append(f'<text x="{place + 16}" y="{row}">{phase}</text>')
    return "\n".join(lines)


def _thinned(trail: Sequence[tuple[Phase, int]]) -> list[tuple[Phase, int]]:
    width = max(1, len(trail) // _POINTS)
    found = []
    for _, group in groupby(enumerate(trail), key=lambda entry: (entry[1][0], entry[0] // width)):
        found.append(max((point for _, point in group), key=lambda point: point[1]))
    return found
