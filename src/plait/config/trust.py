"""Imports the classes and functions that settings name, unless the names come from files that are not trusted.

[Note: whose names become code]
A run description, a command line and a Python call are the user's own: code that they name is imported. Code that a
*stored* file names is not. Stored files are a checkpoint's `manifest.json`, the `config.yaml` that a run wrote into its
folder, and the `config.json` and `tokenizer_config.json` of a Hugging Face folder. Anybody may have written such a
file, and `model.target: os:system` in it would run a command as soon as the model is opened. So a name that was read
from a stored file keeps that file's path (`StoredName`), and is refused without `--trust-code` (`trust_code: true` in a
run description of the user's own). A stored `trust_code` is ignored.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

from plait.config.text import nearest
from plait.errors import ConfigError, PlaitError, Problem

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STORED_IN = "stored_in"
"""The key, in the context of a validation, of the stored file that the values come from."""
KEY = "trust_code"
"""The key of a run description."""
_CODE_FILES = ("config.json", "tokenizer_config.json")
"""Files of a Hugging Face folder whose `auto_map` names classes in Python files, beside it or on the hub."""

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""`package.module:name`, which is a custom part under any key."""
_DECIDING = frozenset({"target", "reward", KEY})
"""Keys, without the sections above them, that name code, or decide whether it is run."""


class StoredName(str):
    """A name of code that was read from a stored file."""

    stored_in: str

    def __new__(cls, name: str, stored_in: str) -> StoredName:
        """`stored_in` is the file, for messages."""
        made = super().__new__(cls, name)
        made.stored_in = stored_in
        return made

    def __reduce__(self) -> tuple[type[StoredName], tuple[str, str]]:
        """A copy, in this process or another, stays a stored name."""
        return StoredName, (str(self), self.stored_in)


def keep_origin(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
    """Validate a key that names code: return a `StoredName` for a name from a stored file."""
    name: str = check(value)
    stored_in = value.stored_in if isinstance(value, StoredName) else (info.context or {}).get(STORED_IN)
    return name if stored_in is None or ":" not in name else StoredName(name, stored_in)


@cache
def entry_points_of(plugin_kind: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the installed plug-ins of a kind by name, from their packages' metadata. Imports none of them."""
    from importlib.metadata import entry_points  # slow: it reads the metadata of every package

    by_name: dict[str, tuple[EntryPoint, ...]] = {}
    for entry_point in entry_points(group=f"plait.{plugin_kind}"):
        by_name[entry_point.name] = (*by_name.get(entry_point.name, ()), entry_point)
    return by_name


def plugin_kinds() -> list[str]:
    """Return every kind for which an installed package declares a plug-in."""
    from importlib.metadata import entry_points

    return sorted(group.removeprefix("plait.") for group in entry_points().groups if group.startswith("plait."))


def load_plugin(plugin_kind: str, name: str, *, key: str) -> Any:
    """Return the object of an installed plug-in. Raises `ConfigError` as `load_code` does, and where two have its
    name."""
    if isinstance(name, StoredName):
        raise refusal(key, name, name.stored_in)
    several = entry_points_of(plugin_kind)[name]
    if len(several) > 1:
        packages = ", ".join(
            f"{candidate.dist.name if candidate.dist else '?'} ({candidate.value})" for candidate in several
        )
        message = f"{len(several)} installed packages have a plug-in of kind {plugin_kind} named {name!r}: {packages}"
        raise ConfigError(Problem(key, message, f"Write the one you want as package.module:name: {several[0].value}."))
    entry_point = several[0]
    package = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unknown package"
    try:
        return load_code(entry_point.value, key=key)
    except ConfigError as error:
        problem = error.problems[0]
        message = f"the plug-in {name!r} of {package} cannot be loaded: {problem.message}"
        raise ConfigError(Problem(key, message, f"Update or remove {package.partition(' ')[0]}.")) from error


def load_code(name: str, *, key: str) -> Any:
    """Return the object that `package.module:name` names. `key` is the key, option or argument with it, for messages.

    Raises `ConfigError` for a name from a stored file, and for one that cannot be imported, with the reason.
    """
    if isinstance(name, StoredName):
        raise refusal(key, name, name.stored_in)
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        message = f"{name!r} is not of the form package.module:name"
        raise ConfigError(Problem(key, message, "Write it as package.module:name."))
    target = load_module(module_name, key=key, name=name)
    for attribute in path.split("."):
        if not hasattr(target, attribute):
            close = nearest(attribute, dir(target))
            remedy = f"Did you mean {close!r}?" if close else "Write it as package.module:name."
            error = AttributeError(attribute)
            raise ConfigError(Problem(key, f"{name!r}: {module_name!r} has no {attribute!r}", remedy)) from error
        target = getattr(target, attribute)
    return target


def load_module(module_name: str, *, key: str, name: str | None = None) -> Any:
    """Import a module that the user names, alone or in `name`. Raises `ConfigError` with the reason of a failure."""
    shown = name or module_name
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            remedy = "Install it, or put its folder on PYTHONPATH."
            raise ConfigError(Problem(key, f"{shown!r}: no module {error.name!r}", remedy)) from error
        raise _failed(key, shown, module_name, error) from error
    except PlaitError:  # it has its own message
        raise
    except Exception as error:  # a user's module may raise any exception when it is imported
        raise _failed(key, shown, module_name, error) from error


def _failed(key: str, name: str, module_name: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    message = f"{name!r}: importing {module_name!r} failed: {type(error).__name__}: {error}{where}"
    return ConfigError(Problem(key, message, "Correct that module."))


def refusal(key: str, name: str, stored_in: str | Path) -> ConfigError:
    """Return the error for a name from a stored file."""
    message = f"{str(name)!r} is code, named in {stored_in}; code that a stored file names is not run"
    remedy = "Read that code first. To run it, add --trust-code, or trust_code: true to a run description of your own."
    return ConfigError(Problem(key, message, remedy))


def code_keys(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the keys of stored settings, dotted or nested, that name code or decide whether it is run."""
    for key, value in settings.items():
        where = f"{above}.{key}" if above else key
        values = value if isinstance(value, list) else [value]
        if key.rpartition(".")[2] in _DECIDING or any(
            isinstance(entry, str) and _CODE.fullmatch(entry) for entry in values
        ):
            yield where
        for entry in values:
            if isinstance(entry, Mapping):
                yield from code_keys(entry, where)


@contextmanager
def transformers_code(source: str | Path | Mapping[str, Any], *, trust_code: bool, key: str) -> Iterator[bool]:
    """Yield the `trust_remote_code` for `transformers`, and refuse code that is needed but not trusted.

    `source` is a folder, or a `config.json` as a mapping. What its outermost level names is left to `transformers`,
    which has its own classes for many such models. What an inner model names is refused here: `transformers` would ask
    on the terminal.
    """
    named = [] if trust_code else list(_named_code(source))
    for file, path, name in named:
        if path != "auto_map":
            raise refusal(key, name, f"{file}, {path}")
    try:
        yield trust_code
    except ValueError as error:
        if named and "trust_remote_code" in str(error):
            file, path, name = named[0]
            raise refusal(key, name, f"{file}, {path}") from error
        raise


def _named_code(source: str | Path | Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (file, path in the file, name) for each name of a class or function that stored files contain."""
    for file, content in _descriptions(source):
        for path, name in _code_names(content):
            yield file, path, name


def _descriptions(source: str | Path | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(source, Mapping):
        yield "model.config", source
        return
    for name in _CODE_FILES:
        file = Path(source) / name
        if file.is_file():
            try:
                yield str(file), json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(Problem(str(file), f"it is not JSON: {error}", "Copy the folder again.")) from error


def _code_names(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, name) for each `auto_map`, with its first class, and for each kernel of the Hugging Face Hub.

    Some releases of `transformers` honour two private keys: `_attn_implementation_internal`, which names a kernel too
    (before 5.3, CVE-2026-4372), and `trust_remote_code`, which a file must not set itself (before 5.5, CVE-2026-5241).
    """
    inner = content.items() if isinstance(content, Mapping) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        where = f"{path}.{key}" if path else str(key)
        if key == "auto_map" and value:
            yield where, next(_texts(value), repr(value))
        elif "_implementation" in str(key) and (kernel := next((text for text in _texts(value) if "/" in text), "")):
            yield where, kernel  # the code in this repository of the hub is downloaded and run
        elif key == "trust_remote_code" and value:
            yield where, str(key)
        else:
            yield from _code_names(value, where)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
