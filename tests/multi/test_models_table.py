"""`docs/models.md` says what a run says: some of its cells are measured again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hf_cells import CELLS, Pools, measure

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FAMILIES = {
    "Causal language models": "causal-lm",
    "Masked language models": "masked-lm",
    "Encoder-decoders": "seq2seq-lm",
    "Image and text": "image-text",
}
CHECKED = [
    ("causal-lm", "qwen3_moe", ("train", "tp", "ep", "export")),
    ("causal-lm", "gemma3_text", ("load", "pp")),
    ("causal-lm", "mamba2", ("zero3", "generate")),
    ("causal-lm", "bloom", ("cp",)),
]
"""Measured in every session."""


def published() -> dict[tuple[str, str], dict[str, str]]:
    """What the page says: by family and model type, the mark of each cell."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    kind = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = FAMILIES.get(line.removeprefix("## "), "")
        row = [entry.strip() for entry in line.strip("|").split("|")]
        if kind and line.startswith("| ") and not row[0].startswith(("model type", "equal of")):
            found[kind, row[0]] = dict(zip(CELLS, row[1:], strict=True))
    return found


def drawn(fresh: bool) -> list[tuple[str, str, tuple[str, ...]]]:
    if not fresh:
        return CHECKED
    rows = random.sample(sorted(published()), 6)
    return [(*row, tuple(random.sample(CELLS, 3))) for row in rows]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


def mark_of(outcome: str) -> str:
    return {"equal": "=", "refused": "a number", "n/a": "–", "wrong": "wrong", "traceback": "error"}[outcome]


def test_the_page_says_what_a_run_says(pools: Pools, request: pytest.FixtureRequest) -> None:
    page = published()
    differing = {}
    for kind, model_type, cells in drawn(request.config.option.fresh):
        for cell, outcome in measure(kind, model_type, cells, pools).items():
            mark = page[kind, model_type][cell]
            if ("a number" if mark.isdigit() else mark) not in ("", mark_of(outcome.outcome)):
                differing[model_type, cell] = mark, outcome
    assert differing == {}
