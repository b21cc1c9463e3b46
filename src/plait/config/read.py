"""Reads a run description from a file: YAML, TOML, JSON, or JSON with comments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.config.encoding import as_utf8, half_character
from plait.config.words import listed, nearest, show
from plait.errors import ConfigError, Problem

_JSON = (".json", ".jsonc", ".json5")
_YAML = (".yaml", ".yml")
ENDINGS = (*_YAML, ".toml", *_JSON)
DEEPEST = 100
"""Brackets in one another: more than any description has, and less than Python's stack."""


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values in `source`, unchecked. An empty file is an empty run description."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        raise ConfigError(Problem(str(path), "this is a folder", _inside(path)))
    if path.suffix.lower() not in ENDINGS:
        remedy = f"A run description is a file ending in {listed(ENDINGS, 'or')}."
        raise ConfigError(Problem(str(path), f"the ending {show(path.suffix)} says no known format", remedy))
    data = parse_text(path, text_of(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        message = f"expected keys and values at the top, found {show(data)}"
        raise ConfigError(Problem(str(path), message, "Write sections, for example `strategy: ddp`."))
    return data


def text_of(path: Path) -> str:
    """The text of a file of settings. Raises `ConfigError` where it is missing, or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(Problem(str(path), "there is no such file", _neighbours(path))) from None
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8 text"
        remedy = as_utf8(error.object)
        raise ConfigError(Problem(str(path), message, f"{remedy[0].upper()}{remedy[1:]}.")) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError(Problem(str(path), message, "Give a file that can be read.")) from None


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    stems = {each.stem: each.name for each in sorted(folder.iterdir()) if each.suffix.lower() in ENDINGS}
    meant = nearest(path.stem, stems)  # without the ending, which makes any two names look alike
    return (f"Did you mean `{stems[meant]}`? " if meant else "") + _inside(folder)


def _inside(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if each.suffix.lower() in ENDINGS)
    if not names:
        return f"The folder {folder.resolve()} has no run description at all."
    return f"The folder has {', '.join(names) if len(names) <= 8 else ', '.join(names[:8]) + ' and more'}."


def parse_text(path: Path, text: str) -> Any:
    """What the text of a file says, by the ending of its name. Raises `ConfigError` with the place of an error."""
    ending = path.suffix.lower()
    parse = _parse_yaml if ending in _YAML else _parse_json if ending in _JSON else _parse_toml
    try:
        data = parse(path, text)
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # of Python's own int(), which takes no number of thousands of digits
        raise ConfigError(
            Problem(str(path), f"a number in it cannot be read: {error}", "Write fewer digits.")
        ) from None
    if depth_of(data) > DEEPEST:
        raise _too_deep(path)
    if wrong := half_character("\n".join(texts_in(data))):
        raise ConfigError(Problem(str(path), wrong, "Write the character itself."))
    return data


def texts_in(data: Any) -> Iterator[str]:
    """Every text in lists and mappings, keys included."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from texts_in(key)
            yield from texts_in(value)
    elif isinstance(data, list):
        for each in data:
            yield from texts_in(each)


def depth_of(data: Any) -> int:
    """How many lists and mappings lie in one another: all that walks through them calls itself."""
    depth, layer = 0, [data]
    while layer := [each for each in layer if isinstance(each, (dict, list))]:
        depth += 1
        if depth > DEEPEST:
            break
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _too_deep(path: Path) -> ConfigError:
    message = f"lists and keys in it lie more than {DEEPEST} deep in one another"
    return ConfigError(Problem(str(path), message, "Look for a bracket that is not closed where it should be."))


def _parse_yaml(path: Path, text: str) -> Any:
    import yaml

    from plait.config import dialect

    try:
        return dialect.load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        tab = "'\\t'" in (error.problem or "")
        remedy = "YAML is indented with spaces, never with tabs." if tab else ""
        raise _syntax(path, text, line, column, error.problem or "not YAML", remedy) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise _syntax(path, text, line, column, error.reason) from None


def _parse_json(path: Path, text: str) -> Any:
    import json

    from plait.config import jsonc

    if not text.strip():
        return None
    try:
        return jsonc.load(text)
    except json.JSONDecodeError as error:
        message = error.msg[0].lower() + error.msg[1:]
        raise _syntax(path, text, error.lineno, error.colno, message) from None


def _parse_toml(path: Path, text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        numbers = [int(number) for number in re.findall(r"\d+", where)]
        last = text.count("\n") + 1
        line, column = numbers if len(numbers) == 2 else (last, len(text.splitlines()[-1]) + 1)
        raise _syntax(path, text, line, column, message[0].lower() + message[1:]) from None


def _syntax(path: Path, text: str, line: int, column: int, message: str, remedy: str = "") -> ConfigError:
    """A syntax error with its line quoted and a caret under the place."""
    lines = text.splitlines()
    quoted = lines[line - 1] if 0 < line <= len(lines) else ""
    start = max(0, column - 60)  # a long line is quoted around the place
    shown = quoted[start : start + 100].replace("\t", " ")
    gutter = " " * len(str(line))
    picture = f"{line} | {shown}\n      {gutter} | {' ' * (column - 1 - start)}^"
    return ConfigError(Problem(f"{path}:{line}:{column}", message, f"{remedy}\n      {picture}" if remedy else picture))
