"""Load and build the class or function that a section names: built-in, user-provided, or from an installed package.

A section that may name a user's class or function does so by `type`; see [Note: one way in], `plait.config.part`. Code
that needs it calls `build`, which imports the target, checks the arguments against its signature and calls it. A
built-in section is built in the same way: its `builds` names the function to call.

A package provides plug-ins by entry points, one group per kind:

    [project.entry-points."plait.optimizer"]
    soap = "my_package.optim:SOAP"
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from plait.config import (
    CustomPart,
    ImportedPart,
    PluginKind,
    RunConfig,
    Section,
    StoredName,
    builtin_names,
    choose,
    entry_points_of,
    listed,
    load_code,
    load_plugin,
    plugin_kinds,
)
from plait.errors import ConfigError, PlaitError, Problem


def load(section: Section, key: str) -> Any:
    """Return what a section names: a class, a function, or the object that a script gave. `key` is for messages.

    Raises `ConfigError` if it cannot be imported, is not trusted, or several plug-ins have its name.
    """
    if isinstance(section, ImportedPart):
        return load_code(section.target, key=f"{key}.target")
    if not isinstance(section, CustomPart):
        return load_code(section.builds, key=key)
    return section.given if section.given is not None else find(section.plugin_kind, section.type, f"{key}.type")


def find(plugin_kind: PluginKind, name: str, key: str) -> Any:
    """Return what `package.module:name`, or the name of a plug-in of this kind, stands for. Raises as `load` does."""
    if ":" in name or isinstance(name, StoredName):
        return load_code(name, key=key)
    return load_plugin(plugin_kind, name, key=key)


def build(section: Section, key: str, *args: Any, accepts: type | tuple[type, ...] = (), **given: Any) -> Any:
    """Call what a section names with `args`, `given` and the section's own arguments; return the result.

    A built-in section is passed itself, after `args`. If a script gave an object of a class in `accepts`, it is
    returned as it is. Raises `ConfigError` for unknown arguments, with the nearest known one.
    """
    target = load(section, key)
    if not isinstance(section, (CustomPart, ImportedPart)):
        return target(*args, section, **given)
    name, name_key, arguments, arguments_key = _name_and_arguments(section, key)
    if accepts and not isinstance(target, type) and isinstance(target, accepts):
        if arguments:
            message = f"an object of {type(target).__name__} takes no arguments"
            raise ConfigError(Problem(f"{arguments_key}.{next(iter(arguments))}", message, "Pass them to its class."))
        return target
    if not callable(target):
        message = f"{name!r} is a {type(target).__name__}, which cannot be called"
        raise ConfigError(Problem(name_key, message, "Name a class, or a function that returns an object."))
    return call(target, arguments_key, *args, name=name, arguments=arguments, **given)


def build_instance(section: Section, key: str, *args: Any, cls: type, **given: Any) -> Any:
    """Return what `build` returns, or the object that a script gave; `ConfigError` unless it is an instance of `cls`.

    If `cls` is a protocol, an object with its methods is one.
    """
    made = build(section, key, *args, accepts=cls, **given)
    if isinstance(made, cls) and not isinstance(made, type):
        return made
    assert isinstance(section, (CustomPart, ImportedPart)), section.builds
    name, name_key, *_ = _name_and_arguments(section, key)
    message, path = f"{name!r} returned a {type(made).__name__}, which is not a {cls.__name__}", _import_path(cls)
    if Protocol not in cls.__bases__:
        raise ConfigError(Problem(name_key, message, f"Return an object of a class derived from {path}."))
    methods = [method for method, value in vars(cls).items() if callable(value) and not method.startswith("_")]
    missing = [f"`{method}`" for method in methods if not callable(getattr(made, method, None))]
    raise ConfigError(Problem(name_key, f"{message}: it has no {listed(missing)}", f"Add it; see {path}."))


def _import_path(cls: type) -> str:
    """Return the path that users import a class from: its top-level package if that exports it."""
    package = ".".join(cls.__module__.split(".")[:2])
    return f"{package if hasattr(sys.modules.get(package), cls.__name__) else cls.__module__}.{cls.__name__}"


def load_function(section: CustomPart, key: str, *takes: str) -> Callable[..., Any]:
    """Return the function that a section names, with the section's arguments bound to it.

    `takes` are the names of the positional arguments with which Plait calls it; a `ConfigError` is raised if its
    signature does not fit. If the section names a class, an object of it is created with the section's arguments, and
    that is the function.
    """
    target = load(section, key)
    name, arguments = str(section.type), section.arguments
    if isinstance(target, type):
        target, arguments = call(target, key, name=name, arguments=arguments), {}
    if not callable(target):
        message = f"{name!r} is a {type(target).__name__}, which cannot be called"
        raise ConfigError(Problem(f"{key}.type", message, f"Name a function of ({', '.join(takes)})."))
    _check_arguments(target, key, takes, name, arguments, {}, shown=takes)
    return partial(target, **arguments) if arguments else target


def _name_and_arguments(section: CustomPart | ImportedPart, key: str) -> tuple[str, str, dict[str, Any], str]:
    """Return the name in a section, the key of that name, the section's arguments, and the key that contains these."""
    if isinstance(section, ImportedPart):
        return str(section.target), f"{key}.target", section.args, f"{key}.args"
    return str(section.type), f"{key}.type", section.arguments, key


def call(
    function: Callable[..., Any], key: str, *args: Any, name: str, arguments: Mapping[str, Any], **given: Any
) -> Any:
    """Call user-provided code with Plait's arguments (`args`, `given`) and the user's `arguments`; return the result.

    Raise `ConfigError` if the arguments do not fit its signature, or if it raises.
    """
    if twice := next((argument for argument in arguments if argument in given), None):
        raise ConfigError(Problem(f"{key}.{twice}", f"{name!r} gets {twice!r} from Plait", f"Leave out `{twice}`."))
    _check_arguments(function, key, args, name, arguments, given)
    try:
        return function(*args, **given, **arguments)
    except (PlaitError, MemoryError):
        raise
    except Exception as error:  # user-provided code may raise anything
        if type(error).__name__ == "OutOfMemoryError":  # torch's: not caused by arguments, and explained elsewhere
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{name!r} failed: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        raise ConfigError(Problem(key, message, "Correct its arguments, or that code.")) from error


def _check_arguments(
    function: Callable[..., Any],
    key: str,
    args: tuple[Any, ...],
    name: str,
    arguments: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    shown: Sequence[str] = (),
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return
    known = signature.parameters
    takes_any = any(param.kind is param.VAR_KEYWORD for param in known.values())
    named = [param.name for param in known.values() if param.kind in (param.KEYWORD_ONLY, param.POSITIONAL_OR_KEYWORD)]
    free = [argument for argument in named[len(args) :] if argument not in given]
    unknown = None if takes_any else next((argument for argument in arguments if argument not in free), None)
    if unknown is not None:
        path = f"{key}.{unknown}"
        if free:
            message = f"{name!r} takes no argument {unknown!r}"
            raise ConfigError(Problem(path, message, choose(unknown, free, "argument")))
        raise ConfigError(Problem(path, f"{name!r} takes no arguments here", f"Leave out `{unknown}`."))
    try:
        signature.bind(*args, **given, **arguments)
    except TypeError as error:
        passed = [*(shown or (f"<{type(arg).__name__}>" for arg in args)), *(f"{argument}=…" for argument in given)]
        message = f"{name!r} cannot be called as {name.rpartition(':')[2]}({', '.join(passed)}): {error}"
        required = (param.name for param in known.values() if param.default is param.empty)
        missing = [argument for argument in required if argument in free and argument not in arguments]
        remedy = f"Write `{key}.{missing[0]}`." if missing else "Give it that signature."
        raise ConfigError(Problem(key, message, remedy)) from error


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that an installed package declares."""

    kind: str
    name: str
    target: str
    """`package.module:name`."""
    package: str
    """Name and version."""
    folder: str
    """The folder in which the package is installed."""
    problem: str = ""
    """Why its name cannot be used; empty if it can."""


def installed_plugins() -> list[Plugin]:
    """Return every plug-in of every installed package, with the problems of its declaration. Imports none of them."""
    builtin = builtin_names(RunConfig)
    return [
        Plugin(kind, entry.name, entry.value, *_origin(entry.dist), _problem(kind, entry.name, same_name, builtin))
        for kind in plugin_kinds()
        for same_name in entry_points_of(kind).values()
        for entry in same_name
    ]


def _problem(plugin_kind: str, name: str, several: Sequence[Any], builtin: Mapping[str, frozenset[str]]) -> str:
    if plugin_kind not in get_args(PluginKind):
        return f"plait.{plugin_kind} is not a kind of plug-in. {choose(plugin_kind, get_args(PluginKind), 'kind')}"
    if plugin_kind in ("algorithm", "environment"):
        return "nothing in this version uses it"
    if name in builtin.get(plugin_kind, ()):
        return f"Plait's own {name} comes first: write {several[0].value} in a run description"
    if len(several) > 1:
        return "several packages provide this name: write the one you want as package.module:name"
    return ""


def _origin(distribution: Any) -> tuple[str, str]:
    if distribution is None:
        return "?", "?"
    return f"{distribution.name} {distribution.version}", str(Path(str(distribution.locate_file(""))).resolve())
