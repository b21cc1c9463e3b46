"""Perplexity of texts, and a page that compares the answers of several models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import torch
from torch import nn

from plait.distributed import is_sharded
from plait.errors import GenerateError
from plait.models import IGNORE_INDEX, cross_entropy


class Perplexity(NamedTuple):
    """The perplexity over all tokens of all texts, each counted once."""

    perplexity: float
    mean_loss: float
    """In nats per token."""
    tokens: int


def measure_perplexity(
    model: nn.Module, texts: Sequence[Sequence[int]], *, window: int, stride: int | None = None, rows: int = 8
) -> Perplexity:
    """Return the perplexity of texts, given as tokens. A text longer than `window` is evaluated in sliding windows.

    Consecutive windows overlap by `window - stride` tokens (half a window by default). The loss of these tokens is not
    counted again: they are context for the others, so only tokens at the beginning of a text have little context.
    """
    stride = max(window // 2, 1) if stride is None else stride
    if not 1 <= stride < window:
        raise GenerateError(f"stride={stride} must be at least 1 and less than the window, {window}")
    pieces = [piece for text in texts for piece in _windows(text, window, stride)]
    total, count = 0.0, 0
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(pieces), rows):
                chosen = pieces[first : first + rows]
                width = max(len(tokens) for tokens, _ in chosen) - 1
                ids = torch.zeros(len(chosen), width, dtype=torch.int64)
                labels = torch.full_like(ids, IGNORE_INDEX)
                for row, (tokens, seen) in enumerate(chosen):
                    ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
                    labels[row, seen - 1 : len(tokens) - 1] = torch.tensor(tokens[seen:])
                logits = model(input_ids=ids.to(device))
                loss = cross_entropy(logits.full_tensor() if is_sharded(logits) else logits, labels.to(device))
                total, count = total + float(loss.sum), count + int(loss.count)
    finally:
        model.train(training)
    if count == 0:
        raise GenerateError("the texts are too short: a perplexity needs a text of at least two tokens")
    mean = total / count
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, mean, count)


def _windows(text: Sequence[int], window: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the windows of a text, each with the number of its first tokens whose loss is not counted."""
    counted = 1
    while counted < len(text):
        start = 0 if counted == 1 else max(0, counted - (window - stride))
        end = min(start + window + 1, len(text))
        yield text[start:end], counted - start
        counted = end


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
    captions: Sequence[Sequence[str]] = (),
    figures: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Return a self-contained HTML page with a table of prompts and answers, one column for each of the models `names`.

    `answers` has a list for each prompt, with one text for each name. `captions`, if given, are texts below the
    answers, in the same lists. `figures` are rows at the end: a label, and a text for each name.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in ("prompt", *names))
    body = "".join(
        f"<tr><td>{escape(prompt)}</td>{_cells(texts, captions[at] if captions else ())}</tr>\n"
        for at, (prompt, texts) in enumerate(zip(prompts, answers, strict=True))
    )
    foot = "".join(f"<tr>{_cells((label, *values), ())}</tr>\n" for label, values in figures)
    title = " beside ".join(escape(name) for name in names)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
        f"<h1>{title}</h1>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        f"<tfoot>\n{foot}</tfoot></table>\n</html>\n"
    )


def _cells(texts: Sequence[str], captions: Sequence[str]) -> str:
    below = [f"<small>{escape(caption)}</small>" for caption in captions] or [""] * len(texts)
    return "".join(f"<td>{escape(text)}{caption}</td>" for text, caption in zip(texts, below, strict=True))
