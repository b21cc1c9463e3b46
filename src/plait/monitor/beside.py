"""What a run leaves beside its events, for the report: answers over time, and a picture."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from plait.config import parse_json
from plait.monitor.page import card, text
from plait.monitor.units import decimal, number

ANSWERS = "samples.jsonl"
PICTURES = (("calibration.svg", "Calibration", "how sure the model is, and how often it is right"),)
MOST_STEPS = 8
"""Steps of which answers are shown, evenly over the run."""
MOST_EACH = 3
"""Answers that are shown of one step."""
MOST_SIGNS = 600
"""Of a text; the rest is in the file."""


class Answer(NamedTuple):
    """What a model said to a prompt while it learned."""

    step: int
    prompt: str
    answer: str
    reward: float | None


def read_answers(folder: Path) -> list[Answer]:
    """Every answer in `samples.jsonl`. Where a run went back to a checkpoint, what it said after that was lost."""
    found: list[Answer] = []
    for answer in _lines(folder / ANSWERS):
        if found and answer.step < found[-1].step:
            found = [earlier for earlier in found if earlier.step < answer.step]
        found.append(answer)
    return found


def _lines(path: Path) -> Iterator[Answer]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = parse_json(line)
                yield Answer(int(row["step"]), str(row["prompt"]), str(row["answer"]), number(row.get("reward")))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue  # a line that a crash left unfinished


def answers_card(folder: Path) -> str:
    """Answers over time: of a few steps, a few each."""
    found = read_answers(folder)
    steps = _spread(sorted({answer.step for answer in found}))
    shown = [answer for step in steps for answer in [a for a in found if a.step == step][:MOST_EACH]]
    rows = "".join(
        f'<tr><td class="n">{each.step:,}</td><td><pre>{_short(each.prompt)}</pre></td>'
        f'<td><pre>{_short(each.answer)}</pre></td><td class="n">{_reward(each.reward)}</td></tr>'
        for each in shown
    )
    if not rows:
        return ""
    head = '<tr><th class="n">Step</th><th>Prompt</th><th>Answer</th><th class="n">Reward</th></tr>'
    table = f'<div class="scroll"><table class="said"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    note = "" if len(shown) == len(found) else f"{len(shown)} of {len(found):,}; all are in {ANSWERS}"
    return card("Answers over time", table, note)


def picture_cards(folder: Path) -> str:
    """Pictures that hooks drew, put into the page itself."""
    return "".join(
        card(title, f'<p><img alt="{text(note)}" src="{_inline(folder / name)}"/></p>', note)
        for name, title, note in PICTURES
        if (folder / name).is_file()
    )


def _inline(path: Path) -> str:
    # Within `<img>` an SVG runs no script and loads nothing.
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _spread(steps: Sequence[int]) -> list[int]:
    """The first, the last, and some between."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (MOST_STEPS - 1))] for at in range(MOST_STEPS)]


def _short(words: str) -> str:
    return text(words if len(words) <= MOST_SIGNS else words[:MOST_SIGNS] + " …")


def _reward(value: float | None) -> str:
    return "–" if value is None else text(decimal(value))
