"""`plait chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import typer

from plait.cli.speaking import Opening, open_speaker
from plait.errors import DataError, GenerateError
from plait.generate import Sampling, Speaker, Turn, printable

_COMMAND = re.compile(r"/[a-z]+")
HELP = "/clear begins anew, /undo takes the last question back, /quit ends (so does Ctrl-D); Ctrl-C stops an answer"


def chat(path: str, sampling: Sampling, opening: Opening, *, system: str | None = None) -> None:
    """Talk until the input ends. Every answer is streamed; the whole conversation is the prompt of the next one."""
    speaker = open_speaker(path, opening)
    first = [Turn("system", system)] if system else []
    turns, shows = list(first), sys.stdin.isatty()
    if shows:
        typer.secho(f"{printable(speaker.name)} (template {speaker.template!r}): {HELP}", dim=True)
    while (said := _ask(shows)) is not None:
        if said in ("/quit", "/exit"):
            break
        if said == "/clear":
            turns = list(first)
        elif said == "/undo":
            turns = turns[: max(len(first), len(turns) - 2)]
        elif said in ("/help", "/?"):
            typer.echo(HELP)
        elif _COMMAND.fullmatch(said):
            typer.secho(f"there is no {said}: {HELP}", fg="red", err=True)
        elif said:
            answer = _answer(speaker, [*turns, Turn("user", said)], sampling)
            if answer is not None:
                turns += [Turn("user", said), Turn("assistant", answer)]
                sampling = replace(sampling, seed=sampling.seed + 1)  # the same question twice, two answers


def _ask(shows: bool) -> str | None:
    try:
        return input("> " if shows else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo()
        return None


def _answer(speaker: Speaker, turns: list[Turn], sampling: Sampling) -> str | None:
    """Print the answer as it comes; what was said before an interruption counts. None where there is none.

    A model may write escape sequences, and a terminal would follow them: they are shown instead.
    """
    said: list[str] = []
    try:
        asked = speaker.ask(turns)
        if asked.left_out:
            typer.secho(f"({asked.left_out} earliest turns have no room any more)", dim=True, err=True)
        for piece in speaker.tell(asked.tokens, sampling):
            said.append(piece.text)
            typer.echo(printable(piece.text, keep="\n\t"), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except (GenerateError, DataError) as error:
        typer.secho(str(error), fg="red", err=True)
        return None
    typer.echo()
    return "".join(said)
