"""The page of a profile: one HTML file with the tables and the picture, and nothing outside it."""

from __future__ import annotations

import time
from pathlib import Path

from plait.monitor import page
from plait.runner.profile.account import Lanes
from plait.runner.profile.picture import draw_step, legend
from plait.runner.profile.report import Report
from plait.runner.profile.table import Grid, grids, headline


def write_page(report: Report, lanes: Lanes, folder: Path) -> None:
    """Write `profile.html`, and the picture by itself as `step.svg`."""
    picture = draw_step(lanes)
    (folder / "step.svg").write_text(f"{picture}\n", encoding="utf-8")
    body = [
        _header(report),
        _facts(report),
        page.card(
            "One step",
            f'<div class="wide">{picture}</div><ul class="legend">{legend(lanes)}</ul>',
            "the recorded one of middle length, rank 0",
        ),
        *(page.card(grid.title, _table(grid), grid.note) for grid in grids(report)),
        page.card("Traces", _traces(report), "for chrome://tracing or ui.perfetto.dev"),
        page.footer(time.time()),
    ]
    (folder / "profile.html").write_text(page.document(f"Profile of {report.title}", body), encoding="utf-8")


def _header(report: Report) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in report.layout.items())
    where = f"{len(report.ranks)} × {report.device_name}{f' ({axes})' if axes else ''}"
    last = report.first_step + report.time.steps - 1
    facts = "".join(f"<span>{page.text(fact)}</span>" for fact in (where, f"steps {report.first_step} to {last}"))
    return (
        f'<header><p class="eyebrow">Profile</p><h1>{page.text(report.title)}</h1><p class="sub">{facts}</p></header>'
    )


def _facts(report: Report) -> str:
    shown = "".join(
        f'<div><dt>{page.text(what)}</dt><dd>{page.text(value)}</dd><dd class="note">{page.text(note)}</dd></div>'
        for what, value, note in headline(report)
    )
    return f'<dl class="facts">{shown}</dl>'


def _table(grid: Grid) -> str:
    head = "".join(f"<th{_side(index)}>{page.text(word)}</th>" for index, word in enumerate(grid.heads))
    rows = []
    for number, row in enumerate(grid.rows):
        mark = ' class="differs"' if grid.last_is_sum and number == len(grid.rows) - 1 else ""
        inset = (len(row[0]) - len(row[0].lstrip())) * 0.6
        first = f'<td style="padding-left: {inset:g}em">{page.text(row[0].strip())}</td>'
        cells = "".join(f'<td class="n">{page.text(cell)}</td>' for cell in row[1:])
        rows.append(f"<tr{mark}>{first}{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _side(index: int) -> str:
    return ' class="n"' if index else ""


def _traces(report: Report) -> str:
    links = ", ".join(f'<a href="{page.text(name)}"><code>{page.text(name)}</code></a>' for name in report.traces)
    return f"<p>{links}</p>" if links else ""
