"""`plait convert CONFIG --to yaml`: another framework's configuration as a run description."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from plait.cli.files import write_file
from plait.config import RunConfig, dialect, parse
from plait.errors import ConfigError, Problem
from plait.frontends import Account, Answer, Translation

_YOURS = "# `model` and `data` are yours to add: the other framework leaves them to the script."

_SEARCH = "# A search is a file of its own, for `plait tune run.yaml --search search.yaml`:"


def convert_config(src: str, dst: str | None, *, overwrite: bool) -> None:
    """Print the run description that a configuration stands for, or write it to `dst`.

    The account of every key goes with it as comments. Where the description is not seen on a terminal, the account is
    told on stderr too. Ends with exit code 1 where a key is refused: what is printed is then less than was asked for.
    """
    if dst is not None and Path(dst).exists() and not overwrite:
        raise ConfigError(Problem("DST", f"{dst!r} is there already", "Give another name, or --overwrite."))
    name, translation = translated(Path(src))
    text = written(Path(src).name, name, translation, _search(Path(src)) if name == "DeepSpeed" else {})
    if dst is None:
        typer.echo(text, nl=False)
    else:
        write_file(dst, text, "DST")
    if dst is not None or not sys.stdout.isatty():
        _tell(Path(src).name, name, translation.account)
    if any(translation.account.of(Answer.REFUSED)):
        raise typer.Exit(1)


def translated(path: Path) -> tuple[str, Translation]:
    """Which framework a configuration is of, and what it says in Plait's words."""
    from plait.frontends.accelerate import is_accelerate
    from plait.frontends.accelerate import translate as from_accelerate
    from plait.frontends.deepspeed import KEYS, read_config
    from plait.frontends.deepspeed import translate as from_deepspeed

    config = read_config(path)
    known: list[tuple[str, bool, Callable[[Path], Translation]]] = [
        ("Accelerate", is_accelerate(config), from_accelerate),
        ("DeepSpeed", any(key in KEYS for key in config) and not _is_ours(config), from_deepspeed),
    ]
    for name, fits, translate in known:
        if fits:
            return name, translate(path)
    if _is_ours(config):
        raise ConfigError(Problem("SRC", f"{str(path)!r} is a run description already", "Use it as it is."))
    message = f"{str(path)!r} is neither a configuration of DeepSpeed nor one of Accelerate"
    raise ConfigError(Problem("SRC", message, "Give a ds_config.json, or the YAML of `accelerate config`."))


def written(file: str, name: str, translation: Translation, search: dict[str, Any]) -> str:
    """The run description as YAML, with the account before it as comments, and a search after it as such."""
    account = translation.account
    comments = [f"# {file}, a configuration of {name}. {account.summary()}.", "#"]
    comments += [f"#   {line}" for line in account.lines()]
    text = dialect.dump(translation.sections) if translation.sections else ""
    after = [_YOURS, *([_SEARCH, *(f"#   {line}" for line in dialect.dump(search).splitlines())] if search else [])]
    return "\n".join([*comments, "", *text.splitlines(), "", *after, ""])


def _search(path: Path) -> dict[str, Any]:
    """What the `autotuning` section asks `plait tune` for."""
    from plait.frontends.deepspeed import search

    found = search(path)
    return {} if found is None or not found.enabled else found.config.model_dump(mode="json", exclude_defaults=True)


def _is_ours(config: dict[str, Any]) -> bool:
    from plait.frontends.deepspeed import KEYS

    if not config or not all(key in RunConfig.model_fields for key in config):
        return False
    if not all(key in KEYS for key in config):
        return True
    try:  # `checkpoint` alone may be anybody's: what is in it tells
        parse(config)
    except ConfigError:
        return False
    return True


def _tell(file: str, name: str, account: Account) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("answer", f"key of {name}", "value", "what became of it"):
        table.add_column(heading)
    for entry in account.entries:
        table.add_row(entry.answer.value, entry.key, entry.shown, entry.text)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False, markup=False)
    console.print(f"{file}: {account.summary()}")
    console.print(table)
