"""Answers of several models to the same prompts, on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 80rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .6rem .8rem; border: 1px solid #8884; }
th { position: sticky; top: 0; background: Canvas; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
td:first-child { color: GrayText; }
td small { display: block; margin-top: .4rem; color: GrayText; font-variant-numeric: tabular-nums; }
tfoot td { font-variant-numeric: tabular-nums; }
"""


def page_of(
    names: Sequence[str],
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    notes: Sequence[Sequence[str]] = (),
    figures: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """The page. `answers` has a list for each prompt, with one text for each name.

    `notes`, if there are any, has what is said below each answer; `figures` are rows below all of them.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in ("prompt", *names))
    body = "".join(
        f"<tr><td>{escape(prompt)}</td>{_cells(texts, notes[at] if notes else ())}</tr>\n"
        for at, (prompt, texts) in enumerate(zip(prompts, answers, strict=True))
    )
    foot = "".join(f"<tr>{_cells((label, *values), ())}</tr>\n" for label, values in figures)
    title = " beside ".join(escape(name) for name in names)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
        f"<h1>{title}</h1>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        f"<tfoot>\n{foot}</tfoot></table>\n</html>\n"
    )


def _cells(texts: Sequence[str], notes: Sequence[str]) -> str:
    below = [f"<small>{escape(note)}</small>" for note in notes] or [""] * len(texts)
    return "".join(f"<td>{escape(text)}{note}</td>" for text, note in zip(texts, below, strict=True))
