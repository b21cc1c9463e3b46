"""Reading a configuration file, and those that it is based on.

A file of Python is run; its variables are the configuration. `_base_` names the files that it builds on, and what
those define may be used as `_base_.model.depth`, or in the older form `{{_base_.model.depth}}`.
"""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path
from typing import Any

from plait.config import parse_text, text_of
from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.config.tree import ConfigDict, merge

BASE = "_base_"
_OF_BASE = re.compile(r"""(["']?)\{\{\s*(_base_(?:\.\w+)+)\s*\}\}\1""")
_OF_FILE = re.compile(r"\{\{\s*(file\w+)\s*\}\}")
_OF_ENVIRONMENT = re.compile(r"\{\{\s*\$(\w+)")


def read_file(path: Path) -> dict[str, Any]:
    """The variables of a file, put over those of its bases."""
    return _read(path.expanduser().resolve(), ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        chain = " → ".join(each.name for each in (*above, path))
        raise ConfigError(Problem(BASE, f"the files are based on each other: {chain}", "Leave one of them out."))
    if not path.is_file():
        by = f"the base of {above[-1].name}, " if above else ""
        raise ConfigError(Problem(BASE if above else "config", f"{by}{str(path)!r} is no file", "Check the name."))
    text = _substituted(path)
    tree, bases = _parse(path, text)
    below: dict[str, Any] = {}
    for base in bases:
        found = _read((path.parent / base).resolve(), (*above, path))
        both = sorted(below.keys() & found.keys())
        if both:
            names = ", ".join(f"`{name}`" for name in both)
            message = f"{names} of {Path(base).name} stands in another of the files that {path.name} is based on, too"
            raise ConfigError(Problem(BASE, message, "Leave one of them out."))
        below.update(found)
    own = _variables(path, tree, below) if tree is not None else _data(path, text)
    return merge({key: value for key, value in own.items() if key != BASE}, below)


def _substituted(path: Path) -> str:
    text = text_of(path)
    if found := _OF_ENVIRONMENT.search(text):
        message = f"{path.name} asks for the environment variable {found[1]!r}; what a run does is not decided there"
        raise ConfigError(Problem("config", message, "Pass it on the command line: --cfg-options key=value."))
    words = {
        "fileDirname": path.parent.as_posix(),
        "fileBasename": path.name,
        "fileBasenameNoExtension": path.stem,
        "fileExtname": path.suffix,
    }
    return _OF_FILE.sub(lambda match: words.get(match[1], match[0]), text)


def _parse(path: Path, text: str) -> tuple[ast.Module | None, list[str]]:
    """The program without its `_base_`, and what that named."""
    if path.suffix != ".py":
        named = _data(path, text).get(BASE, [])
        return None, [named] if isinstance(named, str) else list(named)
    if "read_base" in text:
        message = f"{path.name} uses `read_base`, MMEngine's newer form of inheritance, which is not read here"
        raise ConfigError(Problem(BASE, message, f"Write `{BASE} = ['base.py']`."))
    try:
        tree = ast.parse(_OF_BASE.sub(lambda match: match[2], text), str(path))
    except SyntaxError as error:
        message = f"{path.name}, line {error.lineno}: {error.msg}"
        raise ConfigError(Problem("config", message, "It is read as Python.")) from None
    bases: list[str] = []
    kept: list[ast.stmt] = []
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == BASE for target in targets):
            assert isinstance(statement, ast.Assign)
            bases = _literal(path, statement.value)
        else:
            kept.append(statement)
    tree.body = kept
    return tree, bases


def _literal(path: Path, node: ast.expr) -> list[str]:
    try:
        named = ast.literal_eval(node)
    except ValueError:
        message = f"{path.name} computes it, and it must be known before the file is run"
        raise ConfigError(Problem(BASE, message, "Write a text, or a list of them.")) from None
    return [named] if isinstance(named, str) else [str(each) for each in named]


def _variables(path: Path, tree: ast.Module, below: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = {"__file__": str(path), "__name__": path.stem, BASE: ConfigDict(below)}
    try:
        exec(compile(tree, str(path), "exec"), space)  # noqa: S102  # the user's own file, which he names
    except Exception as error:
        message = f"{path.name} fails when it is run: {type(error).__name__}: {error}"
        raise ConfigError(Problem("config", message, "It is run as Python.")) from error
    unwanted = types.ModuleType | types.FunctionType | type
    return {key: value for key, value in space.items() if not key.startswith("_") and not isinstance(value, unwanted)}


def _data(path: Path, text: str) -> dict[str, Any]:
    if path.suffix in (".json", ".yaml", ".yml"):
        found = parse_text(path, text)
        found = {} if found is None else found
    else:
        message = f"{path.name} has the ending {path.suffix!r}"
        raise ConfigError(Problem("config", message, "Files end in .py, .yaml, .yml or .json."))
    if not isinstance(found, dict):
        raise ConfigError(Problem("config", f"{path.name} holds no keys", "Write `key: value`."))
    return found
