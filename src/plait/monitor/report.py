"""The report of a run: one self-contained HTML file with its settings, curves, checkpoints and messages."""

from __future__ import annotations

import base64
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from plait.config import parse_json
from plait.monitor.events import Event, EventKind
from plait.monitor.files import events_path, read_events
from plait.monitor.format import (
    as_number,
    format_bytes,
    format_clock,
    format_count,
    format_decimal,
    format_duration,
    pairs,
    tables,
)
from plait.monitor.history import History, Point, Segment, history
from plait.monitor.svg import Chart, Marker, Series, render

# The style sheet, for light and dark mode. It must be well-formed inside XML: without `&` and `<`.


CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --edge: #e4e3dd; --grid: #ecebe6; --axis: #b9b8b1;
  --ink: #1c1d1f; --soft: #5f6066; --faint: #8b8c92;
  --good: #1c7a4a; --good-bg: #e3f3ea; --warn: #8a5a00; --warn-bg: #fbf0d7; --bad: #b3261e; --bad-bg: #fbe6e4;
  --c0: #2463c9; --c1: #d0650d; --c2: #24845a; --c3: #8146c0; --c4: #bd3a72; --c5: #0d7f8c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121315; --card: #1a1b1e; --edge: #2b2d31; --grid: #26282c; --axis: #4b4d53;
    --ink: #ececea; --soft: #a9aab0; --faint: #7c7d84;
    --good: #6fd09b; --good-bg: #17321f; --warn: #e8bd62; --warn-bg: #362a10; --bad: #ff8f86; --bad-bg: #3c1b19;
    --c0: #6ea3ff; --c1: #ff9f52; --c2: #5fcf98; --c3: #bd92f5; --c4: #f387b1; --c5: #55c8d6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 40px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 4px 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 600; margin: 0; }
h2 small { font-weight: 400; color: var(--faint); font-size: 13px; margin-left: 6px; }
.eyebrow { margin: 0; color: var(--faint); font-size: 13px; }
.sub { margin: 0; color: var(--soft); font-size: 14px;
  display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.pill { display: inline-block; padding: 1px 9px; border-radius: 99px;
  font-size: 12px; font-weight: 600; white-space: nowrap; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.warn { color: var(--warn); background: var(--warn-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.calm { color: var(--soft); background: var(--grid); }
.facts { display: flex; flex-wrap: wrap; gap: 1px; margin: 28px 0 16px; padding: 0;
  background: var(--edge); border: 1px solid var(--edge); border-radius: 12px; overflow: hidden; }
.facts div { flex: 1 1 150px; background: var(--card); padding: 14px 18px 13px; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 2px 0 0; font-size: 24px; font-weight: 600; letter-spacing: -0.015em; line-height: 1.25; }
.facts dd.note { font-size: 12px; font-weight: 400; color: var(--faint); letter-spacing: 0; margin: 0; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px;
  padding: 18px 20px 16px; margin: 0 0 16px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-bottom: 16px; }
.pair .card { margin: 0; }
.pair .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
@media (max-width: 760px) {
  main { padding: 28px 14px; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .wide .chart { min-width: 720px; }
}
.wide, .scroll { overflow-x: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px;
  padding: 0; margin: 8px 0 0; font-size: 13px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 8px; }
.legend b { font-weight: 500; color: var(--ink); }
.legend svg { width: 26px; height: 10px; flex: none; overflow: visible; }
.legend .keys { margin-left: auto; gap: 18px; }
.legend .keys span { display: flex; align-items: center; gap: 7px; }
.chart { display: block; width: 100%; height: auto; margin-top: 4px; overflow: visible; font-family: inherit; }
.chart text { fill: var(--soft); font-size: 12px; }
.chart .tick { fill: var(--faint); font-size: 11.5px; }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .axis { stroke: var(--axis); stroke-width: 1; }
.chart .resume { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 4; }
.chart .caption { fill: currentColor; font-weight: 500; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.chart .bad { fill: var(--bad); font-size: 14px; font-weight: 700; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.line { fill: none; stroke: currentColor; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.line.dashed { stroke-width: 1.25; stroke-dasharray: 2 4; }
.area { fill: currentColor; opacity: 0.09; }
.point { fill: currentColor; }
.dot { fill: var(--card); stroke: currentColor; stroke-width: 1.75; }
.pale { opacity: 0.3; }
.stop rect { fill: transparent; }
.stop line { stroke: var(--axis); stroke-width: 1; }
.stop circle { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.stop line, .stop circle, .stop text { visibility: hidden; pointer-events: none; }
.stop:hover line, .stop:hover circle, .stop:hover text { visibility: visible; }
.stop text { fill: var(--ink); font-weight: 500; white-space: pre; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 10px; }
th, td { text-align: left; padding: 7px 18px 7px 0; border-top: 1px solid var(--grid); vertical-align: top; }
thead th { border-top: 0; font-weight: 500; font-size: 13px; white-space: nowrap; }
thead th:not(.run) { color: var(--faint); }
thead th.run { font-weight: 600; font-size: 14px; }
thead th.run span { color: var(--ink); }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; width: 1%; padding-right: 32px; }
tr.group th { color: var(--ink); font-weight: 600; padding-top: 18px; border-top: 0; }
tbody:first-of-type tr.group:first-child th { padding-top: 7px; }
td { overflow-wrap: anywhere; }
.compare td { width: 50%; }
td.n, th.n { text-align: right; white-space: nowrap; }
.saves td:first-child, .saves th:first-child { width: 1%; }
.said td { width: 45%; }
.said td.n { width: 1%; }
.said pre { margin: 0; padding: 0; background: none; }
img { max-width: 100%; border-radius: 8px; background: #ffffff; }
td:last-child, th:last-child { padding-right: 0; }
tr.differs td { font-weight: 600; }
.run i { display: inline-block; width: 9px; height: 9px; border-radius: 50%;
  background: currentColor; margin-right: 8px; }
code, pre { font-family: "JetBrains Mono", ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 8px 0 0; padding: 14px 16px; background: var(--page); border-radius: 8px; }
figure { margin: 16px 0 0; }
figcaption { color: var(--soft); font-size: 13px; }
.quiet { color: var(--faint); }
td.quiet { white-space: nowrap; }
footer { color: var(--faint); font-size: 13px; margin-top: 24px; }
@media print { body { background: none; } .card, .facts { break-inside: avoid; } }
"""

# The measurements of post-training on preferences and rewards: their charts, and the figures at the top.


def percent(value: float) -> str:
    """Return a share in percent."""
    return f"{value:.1%}"


@dataclass(frozen=True, slots=True)
class Measure:
    """The title and format of one measurement of answers; `key` is its key in events."""

    key: str
    title: str
    subtitle: str
    form: Callable[[float], str] = format_decimal
    signed: bool = False
    """It may be negative, so the y axis does not start at zero."""


MEASURES = (
    Measure("reward", "Reward", "mean over answers", signed=True),
    Measure("accuracy", "Accuracy", "share", percent),
    Measure("kl", "KL", "from the reference"),
    Measure("beta", "Weight of the KL", "beta"),
    Measure("length", "Length", "tokens an answer"),
    Measure("entropy", "Entropy", "nats a token"),
    Measure("policy_loss", "Policy loss", "", signed=True),
    Measure("value_loss", "Value loss", ""),
    Measure("clip_fraction", "Clipped", "share of tokens", percent),
    Measure("reward_std", "Spread of rewards", "standard deviation"),
    Measure("margin", "Margin", "chosen less rejected", signed=True),
    Measure("chosen", "Chosen answers", "mean score", signed=True),
    Measure("rejected", "Rejected answers", "mean score", signed=True),
    Measure("calibration_error", "Calibration error", "", percent),
    Measure("zero_std_groups", "Groups with equal rewards", "share of prompts", percent),
    Measure("skipped_answers", "Answers left out", "", lambda value: f"{value:g}"),
)
"""All measurements of answers, in the order of their charts."""


def answer_figures(story: History) -> Iterator[tuple[str, str, str]]:
    """Yield the figures at the top of the report: the last value, on held-out prompts if any, and the first."""
    for measure in MEASURES[:2]:
        held = story.values(measure.key, EventKind.VALIDATE)
        points = held or story.values(measure.key)
        if points and story.values("reward"):
            name = f"Held-out {measure.title.lower()}" if held else measure.title
            (first_step, first), (_, last) = points[0], points[-1]
            yield name, measure.form(last), f"{measure.form(first)} at step {first_step:,}"


# The sections of the report: functions that return HTML, which is well-formed XML too.


PALETTE = 6
MAX_MESSAGES = 200
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
RESULTS = ("Outcome", "Summary")
LEVELS = {"info": "calm", "warning": "warn", "error": "bad"}


def escaped(value: Any) -> str:
    """Return any value as HTML text, with markup escaped and control characters replaced."""
    return escape(CONTROL.sub("\ufffd", str(value)))


def document(title: str, body: Sequence[str]) -> str:
    """Return the whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escaped(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in body if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def card(title: str, body: str, subtitle: str = "") -> str:
    """Return a titled box; an empty text if `body` is empty."""
    if not body:
        return ""
    small = f" <small>{escaped(subtitle)}</small>" if subtitle else ""
    return f'<section class="card"><h2>{escaped(title)}{small}</h2>{body}</section>'


def page_header(eyebrow: str, title: str, sub: str, more: str = "") -> str:
    """Return the head of a page: the kind of page, its title, and below it `sub` and `more`, which are HTML."""
    return (
        f'<header><p class="eyebrow">{escaped(eyebrow)}</p><h1>{escaped(title)}</h1>'
        f'<p class="sub">{sub}</p>{more}</header>'
    )


def fact_list(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return figures side by side, each a label, a value and a remark; empty without rows."""
    shown = "".join(
        f'<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd><dd class="note">{escaped(remark)}</dd></div>'
        for label, value, remark in rows
    )
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def header(story: History, title: str) -> str:
    """Return the head of the report: title, dates, and how the run ended."""
    times = [e.time for s in story.segments for e in (s.opening, *s.events) if e is not None]
    facts = [status(story)]
    if times:
        facts.append(f"<span>{escaped(_span(min(times), max(times)))}</span>")
    if len(story.segments) > 1:
        facts.append(f"<span>{len(story.segments)} segments</span>")
    return page_header("Training report", title, "".join(facts))


def status(story: History) -> str:
    """Return a badge with the reason why the run ended, or that no end was recorded."""
    last = story.segments[-1] if story.segments else None
    if last is None or last.ending is None:
        return '<span class="pill warn">no end recorded</span>'
    reason = str(last.ending.data.get("reason") or "finished")
    bad = any(sign in reason.lower() for sign in ("error", "fail", "interrupt", "killed", "non-finite"))
    tone = "good" if reason == "finished" else "bad" if bad else "calm"
    return f'<span class="pill {tone}">{escaped(reason)}</span>'


def facts(story: History) -> str:
    """Return the key figures of the run, such as loss and throughput, as HTML."""
    return fact_list(_facts(story))


def _facts(story: History) -> Iterator[tuple[str, str, str]]:
    yield from answer_figures(story)
    if losses := [point for segment in story.segments for point in segment.curve("loss")]:
        yield "Final loss", format_decimal(losses[-1][1]), f"step {losses[-1][0]:,}"
    if validated := story.values("loss", EventKind.VALIDATE):
        step, value = min(validated, key=lambda point: point[1])
        yield "Best validation loss", format_decimal(value), f"step {step:,}"
    if story.segments:
        skipped = int(max((count for _, count in story.values("skipped")), default=0))
        yield "Steps", f"{max(s.last_step for s in story.segments):,}", f"{skipped} skipped" if skipped else ""
        yield "Training time", format_clock(sum(s.seconds for s in story.segments)), ""
    for key, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if rates := story.values(key):
            yield "Throughput", format_count(statistics.median(v for _, v in rates)), f"{unit}, median"
            break
    if memory := story.values("memory"):
        yield "Peak memory", format_bytes(max(v for _, v in memory) * 2**20), "one rank"


def comparison(story: History) -> str:
    """Return the table of settings and results, with one column per segment. Rows that differ are bold."""
    groups: dict[str, dict[str, list[str]]] = {}
    for index, segment in enumerate(story.segments):
        for group, label, value in _rows(segment):
            row = groups.setdefault(group, {}).setdefault(label, ["–"] * len(story.segments))
            row[index] = value
    if not groups:
        return ""
    heads = "".join(
        f'<th class="run c{i % PALETTE}"><i></i><span>{escaped(s.label)}</span></th>'
        for i, s in enumerate(story.segments)
    )
    span = len(story.segments) + 1
    body = ""
    for group, rows in groups.items():
        body += f'<tr class="group"><th colspan="{span}">{escaped(group)}</th></tr>' if group else ""
        for label, values in rows.items():
            mark = ' class="differs"' if len(set(values)) > 1 and group not in RESULTS else ""
            body += f"<tr{mark}><th>{escaped(label)}</th>{''.join(f'<td>{escaped(v)}</td>' for v in values)}</tr>"
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f'<div class="scroll"><table class="compare">{head}<tbody>{body}</tbody></table></div>'


def _rows(segment: Segment) -> Iterator[tuple[str, str, str]]:
    for table in tables(segment.opening.data) if segment.opening else ():
        yield from ((table.title, label, value) for label, value in table.rows)
    losses = [v for _, v in segment.curve("loss")]
    validated = [v for _, v in segment.curve("loss", EventKind.VALIDATE) if math.isfinite(v)]
    yield "Outcome", "Steps", steps_text(segment)
    yield "Outcome", "Time", format_duration(segment.seconds)
    if losses:
        yield "Outcome", "Final loss", format_decimal(losses[-1])
    if validated:
        yield "Outcome", "Best validation loss", format_decimal(min(validated))
    ending = segment.ending
    yield "Outcome", "Ended", str(ending.data.get("reason", "finished")) if ending else "no end recorded"
    if ending and ending.data.get("summary"):
        yield from (("Summary", label, value) for label, value in pairs(ending.data["summary"]))


def steps_text(segment: Segment) -> str:
    """Return the first and last step of a segment."""
    if segment.last_step <= segment.start:
        return "none"
    return f"{segment.start + 1:,} – {segment.last_step:,}"


def checkpoints(story: History) -> str:
    """Return the table of saves."""
    rows = "".join(
        f'<tr><td class="n">{event.step:,}</td><td><code>{escaped(event.data.get("path", ""))}</code></td>'
        f'<td class="n">{_or_dash(event.data.get("bytes"), format_bytes)}</td>'
        f'<td class="n">{_or_dash(event.data.get("seconds"), format_duration)}</td></tr>'
        for event in story.of_kind(EventKind.SAVE)
    )
    head = '<tr><th class="n">Step</th><th>Path</th><th class="n">Size</th><th class="n">Time</th></tr>'
    return (
        f'<div class="scroll"><table class="saves"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
        if rows
        else ""
    )


def messages(story: History) -> str:
    """Return the table of the newest `MAX_MESSAGES` messages of all ranks."""
    shown = story.messages[-MAX_MESSAGES:]
    rows = "".join(_message(event) for event in shown)
    left_out = len(story.messages) - len(shown)
    more = f'<p class="quiet">{left_out:,} earlier messages are in the record of events.</p>' if left_out else ""
    return f"{more}<table><tbody>{rows}</tbody></table>" if rows else ""


def _message(event: Event) -> str:
    level = str(event.data.get("level", "info"))
    rank = f"rank {event.data['rank']}" if "rank" in event.data else ""
    when = datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
    return (
        f'<tr><td class="quiet" style="width: 1%">{when}</td><td style="width: 1%">'
        f'<span class="pill {LEVELS.get(level, "calm")}">{escaped(level)}</span></td>'
        f'<td>{escaped(event.data.get("text", ""))}</td><td class="quiet n">{escaped(rank)}</td>'
        f'<td class="quiet n">step {event.step:,}</td></tr>'
    )


def samples_table(samples: Sequence[tuple[str, str]]) -> str:
    """Return texts that the model generated."""
    return "".join(
        f"<figure><figcaption>{escaped(title)}</figcaption><pre>{escaped(sample)}</pre></figure>"
        for title, sample in samples
    )


def footer(written: float) -> str:
    """Return the date of the page."""
    when = datetime.fromtimestamp(written).strftime("%Y-%m-%d %H:%M")
    return f"<footer>Written by plait on {when}. Everything it shows is inside this file.</footer>"


def _or_dash(value: Any, form: Any) -> str:
    converted = as_number(value)
    return "–" if converted is None else escaped(form(converted))


def _span(first: float, last: float) -> str:
    begin, end = datetime.fromtimestamp(first), datetime.fromtimestamp(last)
    until = end.strftime("%H:%M") if begin.date() == end.date() else end.strftime("%Y-%m-%d %H:%M")
    return f"{begin:%Y-%m-%d %H:%M} – {until}"


# The charts of the report.


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
    event_kind: EventKind = EventKind.TRAIN
    continuous: bool = True
    """Whether the curve is connected across a resume; values that depend on the machine or the layout may jump."""
    from_zero: bool = True
    overlaid: EventKind | None = None
    """Another kind of event with the same measurement, drawn into the same chart."""


def loss_card(story: History) -> str:
    """Return training and validation loss in one chart, each segment in its own colour."""
    series = [*_series(story, "loss", "train"), *_series(story, "loss", "val", event_kind=EventKind.VALIDATE)]
    chart = render(
        Chart(
            series,
            format_decimal,
            "Loss over steps",
            story.domain,
            _markers(story),
            captions=True,
            width=1080,
            height=360,
        )
    )
    return card("Loss", f'{_legend(story, series)}<div class="wide">{chart}</div>' if chart else "", "over steps")


def small_cards(story: History) -> str:
    """Return the charts of all other measurements, two per row; a single last one is as wide as the row."""
    panels = [panel for panel in _panels(story) if story.values(panel.key, panel.event_kind)]
    alone = len(panels) % 2
    cards = "".join(_small(story, panel) for panel in panels[: len(panels) - alone])
    cards += "".join(_small(story, panel, width=1080) for panel in panels[len(panels) - alone :])
    return f'<div class="pair">{cards}</div>' if cards else ""


def _panels(story: History) -> Iterator[Panel]:
    yield from _answers(story)
    yield Panel("lr", "Learning rate", "", lambda v: f"{v:.3e}")
    yield Panel("grad_norm", "Gradient norm", "", format_decimal)
    yield Panel("time", "Step time", "seconds", lambda v: f"{v:.4f} s", continuous=False)
    rate, rate_unit = ("tokens_per_s", "tokens/s") if story.values("tokens_per_s") else ("samples_per_s", "samples/s")
    yield Panel(rate, "Throughput", rate_unit, lambda v: f"{format_count(v)} {rate_unit}", continuous=False)
    peak = max((value for _, value in story.values("memory")), default=0.0)
    unit, scale = ("GiB", 1 / 1024) if peak >= 2048 else ("MiB", 1.0)
    yield Panel("memory", "Peak memory", f"{unit}, one rank", lambda v: f"{v:,.1f} {unit}", scale, continuous=False)
    yield Panel("mfu", "Model FLOPs utilisation", "%", lambda v: f"{v:.1f}%", 100.0, continuous=False)
    yield Panel("loss_scale", "Loss scale", "", lambda v: f"{v:g}")
    drawn = {"loss", "time", "batches", *(measure.key for measure in MEASURES)}
    for key in story.metric_keys(EventKind.VALIDATE):
        if key not in drawn:
            yield Panel(key, key, "validation", format_decimal, event_kind=EventKind.VALIDATE)


def _answers(story: History) -> Iterator[Panel]:
    """Yield the charts of answers: of training, of held-out prompts, or both in one chart."""
    for measure in MEASURES:
        event_kinds = [
            event_kind for event_kind in (EventKind.TRAIN, EventKind.VALIDATE) if story.values(measure.key, event_kind)
        ]
        if event_kinds:
            both = len(event_kinds) == 2
            where = (
                "line: training, circles: held-out" if both else "" if EventKind.TRAIN in event_kinds else "held-out"
            )
            subtitle = " · ".join(text for text in (measure.subtitle, where) if text)
            overlaid = EventKind.VALIDATE if both else None
            yield Panel(
                measure.key,
                measure.title,
                subtitle,
                measure.form,
                event_kind=event_kinds[0],
                from_zero=not measure.signed,
                overlaid=overlaid,
            )


def _small(story: History, panel: Panel, width: int = 520) -> str:
    names = {panel.event_kind: "", panel.overlaid: "held-out"} if panel.overlaid else {panel.event_kind: ""}
    series = [
        one
        for event_kind, name in names.items()
        for one in _series(story, panel.key, name, panel.scale, event_kind, panel.continuous)
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
    event_kind: EventKind = EventKind.TRAIN,
    continuous: bool = True,
) -> Iterator[Series]:
    previous: list[Point] = []
    for index, segment in enumerate(story.segments):
        points = [(step, value * scale) for step, value in segment.curve(key, event_kind)]
        before = [p for p in previous if p[0] <= segment.start and math.isfinite(p[1])]
        if points:
            yield Series(
                name,
                points,
                colour=index % PALETTE,
                dots=event_kind is not EventKind.TRAIN,
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
        f'<li class="c{i % PALETTE}">{LINE_KEY}<b>{escaped(s.label)}</b> '
        f'<span class="quiet">steps {steps_text(s)}</span></li>'
        for i, s in enumerate(story.segments)
    )
    keys = f"<span>{LINE_KEY}train</span>"
    if any(s.dots for s in series):
        keys += f"<span>{DOT_KEY}validation</span>"
    return f'<ul class="legend">{entries}<li class="keys">{keys}</li></ul>'


# Other files of a run that the report shows: sample answers, and charts that hooks wrote.


ANSWERS = "samples.jsonl"
PICTURES = (("calibration.svg", "Calibration", "how sure the model is, and how often it is right"),)
MOST_STEPS = 8
"""The number of steps of which answers are shown, spread evenly over the run."""
MOST_EACH = 3
"""The number of answers that are shown of one step."""
MOST_SIGNS = 600
"""The number of characters that are shown of a text; the file has all of it."""


class ShownAnswer(NamedTuple):
    """The model's answer to a prompt during training."""

    step: int
    prompt: str
    answer: str
    reward: float | None


def read_answers(folder: Path) -> list[ShownAnswer]:
    """Return the answers in `samples.jsonl`, except those after a checkpoint that the run was resumed from."""
    answers: list[ShownAnswer] = []
    for answer in _lines(folder / ANSWERS):
        if answers and answer.step < answers[-1].step:
            answers = [earlier for earlier in answers if earlier.step < answer.step]
        answers.append(answer)
    return answers


def _lines(path: Path) -> Iterator[ShownAnswer]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = parse_json(line)
                yield ShownAnswer(
                    int(row["step"]), str(row["prompt"]), str(row["answer"]), as_number(row.get("reward"))
                )
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue  # a line that a crash left incomplete


def answers_card(folder: Path) -> str:
    """Return the table of answers over time: a few answers of a few steps."""
    answers = read_answers(folder)
    steps = _spread(sorted({answer.step for answer in answers}))
    shown = [answer for step in steps for answer in [a for a in answers if a.step == step][:MOST_EACH]]
    rows = "".join(
        f'<tr><td class="n">{answer.step:,}</td><td><pre>{_short(answer.prompt)}</pre></td>'
        f'<td><pre>{_short(answer.answer)}</pre></td><td class="n">{_or_dash(answer.reward, format_decimal)}</td></tr>'
        for answer in shown
    )
    if not rows:
        return ""
    head = '<tr><th class="n">Step</th><th>Prompt</th><th>Answer</th><th class="n">Reward</th></tr>'
    table = f'<div class="scroll"><table class="said"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    subtitle = "" if len(shown) == len(answers) else f"{len(shown)} of {len(answers):,}; all are in {ANSWERS}"
    return card("Answers over time", table, subtitle)


def picture_cards(folder: Path) -> str:
    """Return the images that hooks drew, embedded in the page."""
    return "".join(
        card(title, f'<p><img alt="{escaped(subtitle)}" src="{_inline(folder / name)}"/></p>', subtitle)
        for name, title, subtitle in PICTURES
        if (folder / name).is_file()
    )


def _inline(path: Path) -> str:
    # Within `<img>` an SVG runs no script and loads nothing.
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MOST_STEPS` of the steps, evenly spread, with the first and the last."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (MOST_STEPS - 1))] for at in range(MOST_STEPS)]


def _short(content: str) -> str:
    return escaped(content if len(content) <= MOST_SIGNS else content[:MOST_SIGNS] + " …")


def write_report(
    source: Sequence[Path | str] | Sequence[Event],
    out: Path,
    title: str,
    samples: Sequence[tuple[str, str]] = (),
    folder: Path | None = None,
) -> None:
    """Write the report of a run to `out`, replacing an older one atomically.

    `source` is the run's events, or the files they were recorded in (`events-rank0.jsonl`, and those of
    other ranks for their messages). Every RUN_START opens a segment, so a run that was stopped and
    resumed, under another strategy or not, is one continued curve. `samples` are (title, text) pairs. `folder` is
    the run's folder, with its answers (`samples.jsonl`) and images, if any.
    """
    events = [item for item in source if isinstance(item, Event)]
    paths = [item for item in source if not isinstance(item, Event)]
    story = history([*events, *read_events(paths)])
    body = (
        header(story, title),
        facts(story),
        loss_card(story),
        small_cards(story),
        "" if folder is None else answers_card(folder) + picture_cards(folder),
        card("Run" if len(story.segments) == 1 else "Segments", comparison(story)),
        card("Samples", samples_table(samples)),
        card("Checkpoints", checkpoints(story)),
        card("Messages", messages(story)),
        footer(time.time()),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.is_file():
        out.write_text(document(title, body), encoding="utf-8")  # a pipe or /dev/null must not be replaced
        return
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(document(title, body), encoding="utf-8")
    temporary.replace(out)


class HtmlSink:
    """Rewrites `work_dir/report.html` when a run ends, from the events of all runs in `work_dir`."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._stale = False

    def write(self, event: Event) -> None:
        """Write the report at RUN_END; otherwise mark it as outdated."""
        self._stale = True
        if event.kind is EventKind.RUN_END:
            self._write_report()

    def close(self) -> None:
        """Write the report of a run that ended without RUN_END."""
        if self._stale:
            self._write_report()

    def _write_report(self) -> None:
        others = sorted(self._work_dir.glob("events-rank*.jsonl"))
        first = events_path(self._work_dir, 0)
        write_report(
            [first, *(path for path in others if path != first)],
            self._work_dir / "report.html",
            self._work_dir.resolve().name,
            folder=self._work_dir,
        )
        self._stale = False
