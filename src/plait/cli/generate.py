"""`plait generate`: texts from prompts, alone or beside another model's, and how well a model expects a text."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from plait.cli.speaking import Opening, open_speaker
from plait.errors import DataError, GenerateError
from plait.generate.options import Sampling
from plait.generate.perplexity import Perplexity, measure_perplexity
from plait.generate.side_by_side import page_of
from plait.generate.speaker import Speaker

_WINDOW = 1024
"""Tokens at once for a perplexity, where a model does not say how many it sees."""


def generate(
    path: str,
    prompts: list[str],
    sampling: Sampling,
    opening: Opening,
    *,
    prompts_file: str | None = None,
    against: list[str] | None = None,
    html: str | None = None,
    perplexity: str | None = None,
) -> None:
    """Let one or several models continue the prompts, and print the texts or write them side by side."""
    asked = [*prompts, *([] if prompts_file is None else read_prompts(Path(prompts_file)))]
    text = None if perplexity is None else _read(Path(perplexity))
    if not asked and text is None:
        asked = ["def "]
    if html is None and against:
        raise GenerateError("--against needs --html, the page that shows the models side by side")
    paths = [path, *(against or [])]
    answers: list[list[str]] = [[] for _ in asked]
    expected: list[Perplexity] = []
    for each in paths:  # one after another, so that one at a time is in memory
        speaker = open_speaker(each, opening)
        if text is not None:
            expected.append(_expect(speaker, text))
            typer.echo(f"{each}: perplexity {expected[-1].perplexity:.4g} over {expected[-1].tokens} tokens")
        found = speaker.write([speaker.encode(prompt) for prompt in asked], sampling)
        for row, prompt, (answer, completion) in zip(answers, asked, found, strict=True):
            row.append(answer)
            if html is None:
                typer.echo(prompt + answer)
            if completion.finish_reason == "length" and len(completion.tokens) < sampling.max_new_tokens:
                typer.echo(f"({each} sees {speaker.generator.context} tokens: no room for more)", err=True)
    if html is not None:
        figures = [("perplexity", [f"{each.perplexity:.4g}" for each in expected])] if expected else []
        Path(html).write_text(page_of(paths, asked, answers, figures=figures), "utf-8")
        typer.echo(f"side by side: {html}")


def read_prompts(file: Path) -> list[str]:
    """A prompt a line; in a `.jsonl` file, the field `prompt` of each line, or `text`."""
    lines = [line for line in _read(file).splitlines() if line.strip()]
    if file.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number} is not JSON: {error}") from error
        prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
        if not isinstance(prompt, str):
            raise DataError(f"{file}, line {number} has no text as `prompt` or `text`")
        prompts.append(prompt)
    return prompts


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text: {error}") from error


def _expect(speaker: Speaker, text: str) -> Perplexity:
    window = speaker.generator.context or _WINDOW
    return measure_perplexity(speaker.generator.model, [speaker.tokenizer.encode(text)], window=window)
