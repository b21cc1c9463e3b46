"""Line charts as inline SVG, without scripts; the crosshair is CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from plait.monitor.history import Point

MAX_POINTS = 600
MAX_STOPS = 120
TOP, RIGHT, BOTTOM, LEFT = 26, 10, 24, 46
READOUT = 14
CAPTION_ROWS = 3


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `colour` is the index of a palette entry."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    """Drawn as open circles on a thin dashed line rather than as a solid line."""
    lead_in: Point | None = None
    """The last point of the curve that this one continues."""
    fade_after: float = math.inf
    """Points after this step are pale: a later segment repeated these steps."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A vertical line with a caption."""

    step: int
    text: str
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps. `from_zero` starts the y axis at zero and fills the area under the curves."""

    series: Sequence[Series]
    form: Callable[[float], str]
    """Formats a value for the tooltip."""
    label: str
    """What the chart shows, for screen readers."""
    domain: tuple[int, int]
    """First and last step of the x axis, the same for all charts of a page."""
    markers: Sequence[Marker] = ()
    captions: bool = False
    """Write the text of the markers, instead of showing it as a tooltip only."""
    from_zero: bool = False
    width: int = 520
    height: int = 210


class Scale:
    """Maps data to pixels along one axis."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return about `limit` points with the same outline: the lowest and the highest of each interval."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for at in range(0, len(points), size):
        stretch = [p for p in points[at : at + size] if math.isfinite(p[1])]
        if stretch:
            extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
            kept += sorted(extremes)
    return kept


def render(chart: Chart) -> str:
    """Return the chart as one `<svg>` element; empty where no value is finite."""
    finite = [p for s in chart.series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return ""
    x, y = _scales(chart, finite)
    y_ticks = ticks(y.low, y.high, max(3, round((y.start - y.end) / 36)))
    steps = [step for step in ticks(x.low, x.high, max(3, round((x.end - x.start) / 90))) if step == int(step)]
    elements = [*_grid(x, y, steps, y_ticks, lambda step: f"{int(step):,}")]
    elements += [_marker(chart, marker, row, x) for row, marker in enumerate(chart.markers)]
    for series in chart.series:
        elements += _series(chart, series, x, y)
    elements += _tooltips(chart, x, y)
    body = "\n".join(elements)
    return (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f"aria-label={quoteattr(chart.label)}>\n{body}\n</svg>"
    )


def _scales(chart: Chart, finite: Sequence[Point]) -> tuple[Scale, Scale]:
    values = [value for _, value in finite]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (min(0.0, low), high + margin) if chart.from_zero else (low - margin, high + margin)
    x = Scale(*chart.domain, LEFT, chart.width - RIGHT)
    return x, Scale(low, high, chart.height - BOTTOM, TOP)


def _grid(
    x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: Callable[[float], str]
) -> Iterator[str]:
    start, end, base = _px(x.start), _px(x.end), _px(y.start)
    for value in y_ticks:
        at = _px(y(value))
        yield f'<line class="grid" x1="{start}" x2="{end}" y1="{at}" y2="{at}"/>'
        label = escape(tick_label(value))
        yield f'<text class="tick" x="{_px(x.start - 8)}" y="{_px(y(value) + 4)}" text-anchor="end">{label}</text>'
    yield f'<line class="axis" x1="{start}" x2="{end}" y1="{base}" y2="{base}"/>'
    for value in x_ticks:
        at = _px(x(value))
        yield f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{_px(y.start + 4)}"/>'
        yield f'<text class="tick" x="{at}" y="{_px(y.start + 18)}" text-anchor="middle">{x_label(value)}</text>'


def _marker(chart: Chart, marker: Marker, row: int, x: Scale) -> str:
    at = x(marker.step)
    line = (
        f'<line class="resume" x1="{_px(at)}" x2="{_px(at)}" y1="{TOP}" y2="{chart.height - BOTTOM}">'
        f"<title>{escape(marker.text)}</title></line>"
    )
    if not chart.captions:
        return line
    # The caption is on the side with space for it; captions of neighbours are below one another.
    right = at < x.start + 0.65 * (x.end - x.start)
    anchor = f'x="{_px(at + 7 if right else at - 7)}" text-anchor="{"start" if right else "end"}"'
    height = TOP + 12 + 15 * (row % CAPTION_ROWS)
    return f'{line}<text class="caption c{marker.colour}" {anchor} y="{height}">{escape(marker.text)}</text>'


def _series(chart: Chart, series: Series, x: Scale, y: Scale) -> Iterator[str]:
    points = downsample(series.points)
    kept = [p for p in points if p[0] <= series.fade_after]
    pale = [p for p in points if p[0] > series.fade_after]
    if series.lead_in is not None and kept:
        kept = [series.lead_in, *kept]
    if pale and kept:
        pale = [kept[-1], *pale]
    colour = f"c{series.colour}"
    for points, style in ((pale, " pale"), (kept, "")):
        for run in _runs(points):
            path = " ".join(f"{'ML'[i > 0]}{_px(x(s))} {_px(y(v))}" for i, (s, v) in enumerate(run))
            if chart.from_zero and not series.dots and not style and len(run) > 1:
                ground = f"L{_px(x(run[-1][0]))} {_px(y.start)} L{_px(x(run[0][0]))} {_px(y.start)} Z"
                yield f'<path class="area {colour}" d="{path} {ground}"/>'
            yield f'<path class="line {colour}{style}{" dashed" if series.dots else ""}" d="{path}"/>'
            if series.dots:
                dots = (p for p in run if p != series.lead_in)
                for s, v in dots:
                    yield f'<circle class="dot {colour}{style}" cx="{_px(x(s))}" cy="{_px(y(v))}" r="3.5"/>'
            elif len(run) == 1:
                s, v = run[0]
                yield f'<circle class="point {colour}{style}" cx="{_px(x(s))}" cy="{_px(y(v))}" r="2.5"/>'
    for step, value in series.points:
        if not math.isfinite(value):
            title = f"<title>{escape(f'step {step}: {series.name} is {value}')}</title>"
            yield f'<text class="bad" x="{_px(x(step))}" y="{_px(y.start - 4)}" text-anchor="middle">×{title}</text>'


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield runs of finite points: a non-finite value breaks the line."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


IMAGE_STYLE = """
svg { background: #ffffff; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; }
text { fill: #5f6066; } .title { font-size: 14px; font-weight: 600; fill: #1c1d1f; }
.grid { stroke: #ecebe6; } .axis { stroke: #b9b8b1; } .guide { stroke: #8b8c92; stroke-dasharray: 4 4; }
.curve { fill: none; stroke: #2463c9; stroke-width: 1.75; } circle { fill: #2463c9; }
rect { fill: #2463c9; stroke: #ffffff; stroke-width: 0.5; }
"""


def image(width: int, height: int, elements: Sequence[str], *, label: str) -> str:
    """Return a complete SVG document with its own style."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label={quoteattr(label)}>\n<style>{IMAGE_STYLE}</style>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def axes(x: Scale, y: Scale, x_label: str, y_label: str, *, whole: bool = False) -> Iterator[str]:
    """Yield the grid, ticks and labels of one plot in an `image`; `whole`: the ticks of the y axis are integers."""
    y_ticks = [value for value in ticks(y.low, y.high, 6) if not whole or value == int(value)]
    yield from _grid(x, y, ticks(x.low, x.high, 6), y_ticks, tick_label)
    middle = _px((x.start + x.end) / 2)
    yield f'<text x="{middle}" y="{_px(y.start + 38)}" text-anchor="middle">{escape(x_label)}</text>'
    origin = f"{_px(x.start - 42)} {_px((y.start + y.end) / 2)}"
    yield f'<text transform="translate({origin}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def _tooltips(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """Yield invisible columns; the one under the pointer shows its line, its dots and its numbers."""
    values = [
        {step: v for step, v in series.points if math.isfinite(v) and step <= series.fade_after}
        for series in chart.series
    ]
    steps = _tooltip_steps(chart, values)
    edges = [x.start, *((x(a) + x(b)) / 2 for a, b in pairwise(steps)), x.end]
    for (left, right), step in zip(pairwise(edges), steps, strict=True):
        hits = [(s, known[step]) for s, known in zip(chart.series, values, strict=True) if step in known]
        at = _px(x(step))
        dots = "".join(f'<circle class="c{s.colour}" cx="{at}" cy="{_px(y(v))}" r="4"/>' for s, v in hits)
        text = "  ·  ".join([f"step {step:,}", *(f"{s.name} {chart.form(v)}".strip() for s, v in hits)])
        yield (
            f'<g class="stop"><rect x="{_px(left)}" y="{TOP}" width="{_px(max(right - left, 0.1))}" '
            f'height="{_px(y.start - y.end)}"/><line x1="{at}" x2="{at}" y1="{TOP}" y2="{_px(y.start)}"/>'
            f'{dots}<text x="{_px(x.end)}" y="{READOUT}" text-anchor="end">{escape(text)}</text>'
            f"<title>{escape(text)}</title></g>"
        )


def _tooltip_steps(chart: Chart, values: Sequence[dict[int, float]]) -> list[int]:
    """Return the steps with a tooltip: every dot, and at most `MAX_STOPS` points of the lines."""
    dots = {step for s, known in zip(chart.series, values, strict=True) if s.dots for step in known}
    lines = sorted({step for s, known in zip(chart.series, values, strict=True) if not s.dots for step in known})
    return sorted(dots.union(lines[:: max(1, math.ceil(len(lines) / MAX_STOPS))]))


def tick_label(value: float) -> str:
    """Return a tick's label in few characters: `2.5`, `20k`, `3e-4`."""
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{round(value, 6):g}"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
