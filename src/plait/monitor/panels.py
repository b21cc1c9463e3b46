"""Which curves the report draws, and how they are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.monitor.history import History, Point
from plait.monitor.learning import MEASURES
from plait.monitor.page import PALETTE, card, steps_text, text
from plait.monitor.svg import Chart, Marker, Series, render
from plait.monitor.units import compact, decimal
from plait.spec import EventKind

LINE_KEY = '<svg viewBox="0 0 26 10"><path class="line" d="M1 5 L25 5"/></svg>'
DOT_KEY = (
    '<svg viewBox="0 0 26 10"><path class="line dashed" d="M1 5 L25 5"/>'
    '<circle class="dot" cx="13" cy="5" r="3.5"/></svg>'
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart of one measurement."""

    key: str
    title: str
    unit: str
    form: Callable[[float], str]
    scale: float = 1.0
    kind: EventKind = EventKind.TRAIN
    continuous: bool = True
    """It goes on where it was after a resume; what depends on the machine or the layout may jump."""
    from_zero: bool = True
    beside: EventKind | None = None
    """Another kind of event that measured the same; drawn into the same chart."""


def loss_card(story: History) -> str:
    """Training and validation loss in one chart; a resumed run goes on in its own colour."""
    series = [*_series(story, "loss", "train"), *_series(story, "loss", "val", kind=EventKind.VALIDATE)]
    chart = render(
        Chart(series, decimal, "Loss over steps", story.domain, _markers(story), captions=True, width=1080, height=360)
    )
    return card("Loss", f'{_legend(story, series)}<div class="wide">{chart}</div>' if chart else "", "over steps")


def small_cards(story: History) -> str:
    """Everything else that was measured, two charts a row; a last one alone has the row to itself."""
    panels = [panel for panel in _panels(story) if story.values(panel.key, panel.kind)]
    alone = len(panels) % 2
    cards = "".join(_small(story, panel) for panel in panels[: len(panels) - alone])
    cards += "".join(_small(story, panel, width=1080) for panel in panels[len(panels) - alone :])
    return f'<div class="pair">{cards}</div>' if cards else ""


def _panels(story: History) -> Iterator[Panel]:
    yield from _answers(story)
    yield Panel("lr", "Learning rate", "", lambda v: f"{v:.3e}")
    yield Panel("grad_norm", "Gradient norm", "", decimal)
    yield Panel("time", "Step time", "seconds", lambda v: f"{v:.4f} s", continuous=False)
    rate, word = ("tokens_per_s", "tokens/s") if story.values("tokens_per_s") else ("samples_per_s", "samples/s")
    yield Panel(rate, "Throughput", word, lambda v: f"{compact(v)} {word}", continuous=False)
    peak = max((value for _, value in story.values("memory")), default=0.0)
    unit, scale = ("GiB", 1 / 1024) if peak >= 2048 else ("MiB", 1.0)
    yield Panel("memory", "Peak memory", f"{unit}, one rank", lambda v: f"{v:,.1f} {unit}", scale, continuous=False)
    yield Panel("mfu", "Model FLOPs utilisation", "%", lambda v: f"{v:.1f}%", 100.0, continuous=False)
    yield Panel("loss_scale", "Loss scale", "", lambda v: f"{v:g}")
    drawn = {"loss", "time", "batches", *(measure.key for measure in MEASURES)}
    for key in story.metric_keys(EventKind.VALIDATE):
        if key not in drawn:
            yield Panel(key, key, "validation", decimal, kind=EventKind.VALIDATE)


def _answers(story: History) -> Iterator[Panel]:
    """What is known of answers: while training, on held-out prompts, or both in one chart."""
    for each in MEASURES:
        kinds = [kind for kind in (EventKind.TRAIN, EventKind.VALIDATE) if story.values(each.key, kind)]
        if kinds:
            both = len(kinds) == 2
            where = "line: training, circles: held-out" if both else "" if EventKind.TRAIN in kinds else "held-out"
            note = " · ".join(part for part in (each.note, where) if part)
            beside = EventKind.VALIDATE if both else None
            ground = not each.signed
            yield Panel(each.key, each.title, note, each.form, kind=kinds[0], from_zero=ground, beside=beside)


def _small(story: History, panel: Panel, width: int = 520) -> str:
    kinds = {panel.kind: "", panel.beside: "held-out"} if panel.beside else {panel.kind: ""}
    series = [
        one
        for kind, name in kinds.items()
        for one in _series(story, panel.key, name, panel.scale, kind, panel.continuous)
    ]
    label = f"{panel.title} over steps"
    chart = render(
        Chart(series, panel.form, label, story.domain, _markers(story), from_zero=panel.from_zero, width=width)
    )
    return card(panel.title, f'<div class="{"wide" if width > 520 else "narrow"}">{chart}</div>', panel.unit)


def _series(
    story: History,
    key: str,
    name: str,
    scale: float = 1.0,
    kind: EventKind = EventKind.TRAIN,
    continuous: bool = True,
) -> Iterator[Series]:
    previous: list[Point] = []
    for index, segment in enumerate(story.segments):
        points = [(step, value * scale) for step, value in segment.curve(key, kind)]
        before = [p for p in previous if p[0] <= segment.start and math.isfinite(p[1])]
        if points:
            yield Series(
                name,
                points,
                colour=index % PALETTE,
                dots=kind is not EventKind.TRAIN,
                lead_in=before[-1] if before and continuous else None,
                fade_after=story.superseded_after(index),
            )
        previous = [*before, *points]


def _markers(story: History) -> list[Marker]:
    return [
        Marker(segment.start, f"resumed at step {segment.start:,} as {segment.label}", index % PALETTE)
        for index, segment in enumerate(story.segments)
        if index and segment.start > 0
    ]


def _legend(story: History, series: list[Series]) -> str:
    entries = "".join(
        f'<li class="c{i % PALETTE}">{LINE_KEY}<b>{text(s.label)}</b> '
        f'<span class="quiet">steps {steps_text(s)}</span></li>'
        for i, s in enumerate(story.segments)
    )
    keys = f"<span>{LINE_KEY}train</span>"
    if any(s.dots for s in series):
        keys += f"<span>{DOT_KEY}validation</span>"
    return f'<ul class="legend">{entries}<li class="keys">{keys}</li></ul>'
