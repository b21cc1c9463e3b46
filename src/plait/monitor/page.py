"""The parts of the report, each a function from a history to HTML that is well-formed XML too."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from typing import Any

from plait.monitor.history import History, Segment
from plait.monitor.learning import learned
from plait.monitor.style import CSS
from plait.monitor.table import pairs, tables
from plait.monitor.units import clock, compact, decimal, duration, number, size
from plait.spec import Event, EventKind

PALETTE = 6
MAX_MESSAGES = 200
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
RESULTS = ("Outcome", "Summary")
LEVELS = {"info": "calm", "warning": "warn", "error": "bad"}


def text(value: Any) -> str:
    """Any value as safe text: markup escaped, characters that no document may hold replaced."""
    return escape(CONTROL.sub("\ufffd", str(value)))


def document(title: str, body: Sequence[str]) -> str:
    """The whole page around its parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def card(title: str, body: str, note: str = "") -> str:
    """A titled box, or nothing where there is nothing to put in it."""
    if not body:
        return ""
    small = f" <small>{text(note)}</small>" if note else ""
    return f'<section class="card"><h2>{text(title)}{small}</h2>{body}</section>'


def header(story: History, title: str) -> str:
    """What was trained, when, and how it ended."""
    times = [e.time for s in story.segments for e in (s.opening, *s.events) if e is not None]
    facts = [status(story)]
    if times:
        facts.append(f"<span>{text(_span(min(times), max(times)))}</span>")
    if len(story.segments) > 1:
        facts.append(f"<span>{len(story.segments)} segments</span>")
    return (
        f'<header><p class="eyebrow">Training report</p><h1>{text(title)}</h1>'
        f'<p class="sub">{"".join(facts)}</p></header>'
    )


def status(story: History) -> str:
    """A pill with the reason of the last end, or the fact that there was none."""
    last = story.segments[-1] if story.segments else None
    if last is None or last.ending is None:
        return '<span class="pill warn">no end recorded</span>'
    reason = str(last.ending.data.get("reason") or "finished")
    bad = any(word in reason.lower() for word in ("error", "fail", "interrupt", "killed", "non-finite"))
    kind = "good" if reason == "finished" else "bad" if bad else "calm"
    return f'<span class="pill {kind}">{text(reason)}</span>'


def facts(story: History) -> str:
    """The few numbers that are asked for first."""
    shown = "".join(
        f'<div><dt>{text(label)}</dt><dd>{text(value)}</dd><dd class="note">{text(note)}</dd></div>'
        for label, value, note in _facts(story)
    )
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _facts(story: History) -> Iterator[tuple[str, str, str]]:
    yield from learned(story)
    if losses := [point for segment in story.segments for point in segment.curve("loss")]:
        yield "Final loss", decimal(losses[-1][1]), f"step {losses[-1][0]:,}"
    if validated := story.values("loss", EventKind.VALIDATE):
        step, value = min(validated, key=lambda point: point[1])
        yield "Best validation loss", decimal(value), f"step {step:,}"
    if story.segments:
        skipped = int(max((count for _, count in story.values("skipped")), default=0))
        yield "Steps", f"{max(s.last_step for s in story.segments):,}", f"{skipped} skipped" if skipped else ""
        yield "Training time", clock(sum(s.seconds for s in story.segments)), ""
    for key, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if rates := story.values(key):
            yield "Throughput", compact(statistics.median(v for _, v in rates)), f"{unit}, median"
            break
    if memory := story.values("memory"):
        yield "Peak memory", size(max(v for _, v in memory) * 2**20), "one rank"


def comparison(story: History) -> str:
    """One column a segment: what it used and what came of it. Rows that changed are set in bold."""
    groups: dict[str, dict[str, list[str]]] = {}
    for index, segment in enumerate(story.segments):
        for group, label, value in _rows(segment):
            row = groups.setdefault(group, {}).setdefault(label, ["–"] * len(story.segments))
            row[index] = value
    if not groups:
        return ""
    heads = "".join(
        f'<th class="run c{i % PALETTE}"><i></i><span>{text(s.label)}</span></th>' for i, s in enumerate(story.segments)
    )
    span = len(story.segments) + 1
    body = ""
    for group, rows in groups.items():
        body += f'<tr class="group"><th colspan="{span}">{text(group)}</th></tr>' if group else ""
        for label, values in rows.items():
            mark = ' class="differs"' if len(set(values)) > 1 and group not in RESULTS else ""
            body += f"<tr{mark}><th>{text(label)}</th>{''.join(f'<td>{text(v)}</td>' for v in values)}</tr>"
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f'<div class="scroll"><table class="compare">{head}<tbody>{body}</tbody></table></div>'


def _rows(segment: Segment) -> Iterator[tuple[str, str, str]]:
    for table in tables(segment.opening.data) if segment.opening else ():
        yield from ((table.title, label, value) for label, value in table.rows)
    losses = [v for _, v in segment.curve("loss")]
    validated = [v for _, v in segment.curve("loss", EventKind.VALIDATE) if math.isfinite(v)]
    yield "Outcome", "Steps", steps_text(segment)
    yield "Outcome", "Time", duration(segment.seconds)
    if losses:
        yield "Outcome", "Final loss", decimal(losses[-1])
    if validated:
        yield "Outcome", "Best validation loss", decimal(min(validated))
    ending = segment.ending
    yield "Outcome", "Ended", str(ending.data.get("reason", "finished")) if ending else "no end recorded"
    if ending and ending.data.get("summary"):
        yield from (("Summary", label, value) for label, value in pairs(ending.data["summary"]))


def steps_text(segment: Segment) -> str:
    """The steps that a segment made, first and last."""
    if segment.last_step <= segment.start:
        return "none"
    return f"{segment.start + 1:,} – {segment.last_step:,}"


def checkpoints(story: History) -> str:
    """Every save, with what it cost."""
    rows = "".join(
        f'<tr><td class="n">{event.step:,}</td><td><code>{text(event.data.get("path", ""))}</code></td>'
        f'<td class="n">{_or_dash(event.data.get("bytes"), size)}</td>'
        f'<td class="n">{_or_dash(event.data.get("seconds"), duration)}</td></tr>'
        for event in story.of_kind(EventKind.SAVE)
    )
    head = '<tr><th class="n">Step</th><th>Path</th><th class="n">Size</th><th class="n">Time</th></tr>'
    return (
        f'<div class="scroll"><table class="saves"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
        if rows
        else ""
    )


def messages(story: History) -> str:
    """What the ranks said; the newest `MAX_MESSAGES` of them."""
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
        f'<span class="pill {LEVELS.get(level, "calm")}">{text(level)}</span></td>'
        f'<td>{text(event.data.get("text", ""))}</td><td class="quiet n">{text(rank)}</td>'
        f'<td class="quiet n">step {event.step:,}</td></tr>'
    )


def samples(found: Sequence[tuple[str, str]]) -> str:
    """Texts that the model wrote."""
    return "".join(
        f"<figure><figcaption>{text(title)}</figcaption><pre>{text(sample)}</pre></figure>" for title, sample in found
    )


def footer(written: float) -> str:
    """Who wrote this page, and when."""
    when = datetime.fromtimestamp(written).strftime("%Y-%m-%d %H:%M")
    return f"<footer>Written by plait on {when}. Everything it shows is inside this file.</footer>"


def _or_dash(value: Any, form: Any) -> str:
    found = number(value)
    return "–" if found is None else text(form(found))


def _span(first: float, last: float) -> str:
    begin, end = datetime.fromtimestamp(first), datetime.fromtimestamp(last)
    late = end.strftime("%H:%M") if begin.date() == end.date() else end.strftime("%Y-%m-%d %H:%M")
    return f"{begin:%Y-%m-%d %H:%M} – {late}"
