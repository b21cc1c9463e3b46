"""The one way in for parts: Plait's own, the user's, and those of installed packages.

A section of a run description that may be a part says what it is by `type`; see [Note: one way in],
`plait.config.part`. The room that needs it calls `build`, which loads it, holds its arguments against its signature and
calls it. A section of Plait's own comes the same way: `builds` names the function that makes what it describes.

A package brings parts by entry points, one group a kind:

    [project.entry-points."plait.optimizer"]
    soap = "my_package.optim:SOAP"
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from plait.config.base import Section
from plait.config.part import Kind, Part
from plait.config.trust import StoredName, entry_points_of, load_code, load_plugin
from plait.config.words import choose
from plait.errors import ConfigError, PlaitError, Problem


def load(section: Section, key: str) -> Any:
    """What a section names: a class, a function, or the object that a script gave. `key` is for messages.

    Raises `ConfigError` where it cannot be imported, is not trusted, or two plug-ins have its name.
    """
    if not isinstance(section, Part):
        return load_code(section.builds, key=key)
    return section.given if section.given is not None else find(section.kind, section.type, f"{key}.type")


def find(kind: Kind, name: str, key: str) -> Any:
    """What a name of a part stands for: `package.module:name`, or a plug-in of this kind. Raises as `load` does."""
    if ":" in name or isinstance(name, StoredName):
        return load_code(name, key=key)
    return load_plugin(kind, name, key=key)


def build(section: Section, key: str, *args: Any, accepts: type | tuple[type, ...] = (), **given: Any) -> Any:
    """Make what a section describes: what it names is called with `args`, `given` and the section's own arguments.

    A section of Plait's own is passed itself, behind `args`. An object of a class in `accepts` that a script gave is
    returned as it is. Raises `ConfigError` for arguments that do not fit, with the nearest that would.
    """
    made = load(section, key)
    if not isinstance(section, Part):
        return made(*args, section, **given)
    arguments = section.arguments
    if accepts and not isinstance(made, type) and isinstance(made, accepts):
        if arguments:
            message = f"a {type(made).__name__} that is made already takes no arguments"
            raise ConfigError(Problem(f"{key}.{next(iter(arguments))}", message, "Give them where it is made."))
        return made
    if not callable(made):
        message = f"{str(section.type)!r} is a {type(made).__name__}, which cannot be called to make one"
        raise ConfigError(Problem(f"{key}.type", message, "Name a class, or a function that returns one."))
    return call(made, key, *args, name=str(section.type), arguments=arguments, **given)


def call(
    function: Callable[..., Any], key: str, *args: Any, name: str, arguments: Mapping[str, Any], **given: Any
) -> Any:
    """Call a part with what Plait gives and with the user's `arguments`; what does not fit is a `ConfigError`."""
    if twice := next((each for each in arguments if each in given), None):
        raise ConfigError(Problem(f"{key}.{twice}", f"{name!r} is given {twice!r} by Plait", f"Leave out `{twice}`."))
    _check_arguments(function, key, args, name, arguments, given)
    try:
        return function(*args, **given, **arguments)
    except PlaitError:
        raise
    except Exception as error:  # whatever a part of somebody else's raises while it is made
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
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, and says nothing of its arguments
        return
    known = signature.parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    named = [each.name for each in known.values() if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    free = [each for each in named[len(args) :] if each not in given]
    if not takes_any:
        for each in arguments:
            if each not in free:
                raise ConfigError(
                    Problem(f"{key}.{each}", f"{name!r} takes no argument {each!r}", choose(each, free, "argument"))
                    if free
                    else Problem(f"{key}.{each}", f"{name!r} takes no arguments here", f"Leave out `{each}`.")
                )
    try:
        signature.bind(*args, **given, **arguments)
    except TypeError as error:
        shown = ", ".join([*(f"<{type(each).__name__}>" for each in args), *(f"{each}=…" for each in given)])
        message = f"{name!r} cannot be called as {name.rpartition(':')[2]}({shown}): {error}"
        missing = [
            each.name
            for each in known.values()
            if each.name in free and each.default is each.empty and each.name not in arguments
        ]
        remedy = f"Write `{key}.{missing[0]}`." if missing else "Give it that signature."
        raise ConfigError(Problem(key, message, remedy)) from error


@dataclass(frozen=True, slots=True)
class Plugin:
    """A part that an installed package declares."""

    kind: Kind
    name: str
    target: str
    """`package.module:name`."""
    package: str
    """Name and version."""
    folder: str
    """Where the package lies."""


def installed() -> list[Plugin]:
    """Every plug-in of every installed package. Imports none of them."""
    return [
        Plugin(kind, each.name, each.value, *_origin(each.dist))
        for kind in get_args(Kind)
        for several in entry_points_of(kind).values()
        for each in several
    ]


def _origin(distribution: Any) -> tuple[str, str]:
    if distribution is None:
        return "?", "?"
    return f"{distribution.name} {distribution.version}", str(Path(str(distribution.locate_file(""))).resolve())
