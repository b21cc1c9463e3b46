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
tfoot td { font-variant-numeric: tabular-nums; }
"""


def page_of(
    names: Sequence[str],
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    figures: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """The page. `answers` has a list for each prompt, with one text for each name; `figures` are rows below them."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("prompt", *names))
    rows = [
        "".join(f"<td>{escape(text)}</td>" for text in (prompt, *texts))
        for prompt, texts in zip(prompts, answers, strict=True)
    ]
    feet = ["".join(f"<td>{escape(text)}</td>" for text in (label, *values)) for label, values in figures]
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    foot = "".join(f"<tr>{row}</tr>\n" for row in feet)
    title = " beside ".join(escape(name) for name in names)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
        f"<h1>{title}</h1>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        f"<tfoot>\n{foot}</tfoot></table>\n</html>\n"
    )
