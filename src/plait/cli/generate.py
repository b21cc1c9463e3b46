"""`plait generate`: texts from prompts, alone or beside another model's, and how well a model expects a text."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from plait.cli.files import write_file
from plait.cli.here import import_from_here
from plait.cli.speaking import Opening, open_speaker
from plait.config import as_utf8, parse_json
from plait.errors import DataError, GenerateError
from plait.generate import Perplexity, Sampling, Speaker, Turn, measure_perplexity, page_of, printable
from plait.posttrain import Message, Question, open_judge, run_behind
from plait.posttrain import held_out as kept_back

_MORE = ("messages", "system", "history", "instruction", "input", "tools")
"""What a prompt of a file may have beside its text, and cannot have here."""
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
    chat: bool = False,
    held_out: int | None = None,
    reward: str | None = None,
) -> None:
    """Let one or several models continue the prompts, and print the texts or write them side by side.

    With `chat`, and for questions that the run has `held_out`, a prompt is a turn of a conversation. `reward` names
    who judges the answers.
    """
    text = None if perplexity is None else _read(Path(perplexity))
    if html is None and against:
        raise GenerateError("--against needs --html, the page that shows the models side by side")
    given = [*prompts, *([] if prompts_file is None else read_prompts(Path(prompts_file)))]
    asked = [Question((Message("user", prompt),)) for prompt in given]
    asked += [] if held_out is None else kept_back(path, held_out, trust_code=opening.trust_code)
    if not asked and text is None:
        asked = [Question((Message("user", "def "),))]
    judge = None
    if reward is not None:
        if not Path(reward).exists():
            import_from_here()  # a function that is named on the command line may lie here
        judge = open_judge(reward, run_behind(path), trust_code=opening.trust_code)
    paths = [path, *(against or [])]
    answers: list[list[str]] = [[] for _ in asked]
    notes: list[list[str]] = [[] for _ in asked]
    figures: dict[str, list[str]] = {}
    for each in paths:  # one after another, so that one at a time is in memory
        speaker = open_speaker(each, opening)
        if text is not None:
            expected = _expect(speaker, text)
            figures.setdefault("perplexity", []).append(f"{expected.perplexity:.4g}")
            typer.echo(f"{each}: perplexity {expected.perplexity:.4g} over {expected.tokens} tokens")
        told = [_prompt(speaker, question, chat=chat or held_out is not None) for question in asked]
        found = speaker.write(told, sampling)
        for row, question, (answer, completion) in zip(answers, asked, found, strict=True):
            row.append(answer)
            if html is None:
                text = question.text + answer
                typer.echo(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
            if completion.finish_reason == "length" and len(completion.tokens) < sampling.max_new_tokens:
                typer.echo(f"({each} sees {speaker.generator.context} tokens: no room for more)", err=True)
        if judge is not None and asked:
            rewards = judge.rewards(asked, [answer for answer, _ in found])
            for row, value in zip(notes, rewards, strict=True):
                row.append("not judged" if math.isnan(value) else f"reward {value:.3g}")
            mean, said = _mean(rewards)
            figures.setdefault("mean reward", []).append(mean)
            typer.echo(f"{each}: reward {mean} over {said}")
    if html is not None:
        rows = list(figures.items())
        write_file(html, page_of(paths, [q.text for q in asked], answers, notes=notes, figures=rows), "--html")
        typer.echo(f"side by side: {html}")


def _prompt(speaker: Speaker, question: Question, *, chat: bool) -> list[int]:
    if not chat:
        return speaker.encode(question.text)
    asked = speaker.ask([Turn(message.role, message.content) for message in question.messages])
    if asked.left_out:
        typer.echo(f"({asked.left_out} earliest turns of {question.text[:40]!r} have no room)", err=True)
    return asked.tokens


def _mean(rewards: Sequence[float]) -> tuple[str, str]:
    """The mean of those that are known, and how many they are."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    lost = len(rewards) - len(known)
    said = f"{len(known)} answers" + (f", {lost} not judged" if lost else "")
    return (f"{sum(known) / len(known):.4g}" if known else "unknown"), said


def read_prompts(file: Path) -> list[str]:
    """A prompt a line; in a `.jsonl` file, the field `prompt` of each line, or `text`."""
    # Not `splitlines`: it takes characters that a text may have, U+2028 and form feeds, for the end of a line.
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file} has no prompt in it: write one a line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number} is not JSON: {error}") from error
        prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
        if more := [key for key in _MORE if isinstance(row, dict) and row.get(key)]:
            raise DataError(f"{file}, line {number} has {more[0]!r}, which would be left out: put all into `prompt`")
        if not isinstance(prompt, str):
            raise DataError(f"{file}, line {number} has no text as `prompt` or `text`")
        prompts.append(prompt)
    return prompts


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {as_utf8(error.object)}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _expect(speaker: Speaker, text: str) -> Perplexity:
    window = speaker.generator.context or _WINDOW
    return measure_perplexity(speaker.generator.model, [speaker.encode(text)], window=window)
