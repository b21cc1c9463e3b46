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
    """What a section names: a class, a function, or the object that a script gave. `key` is for messages.

    Raises `ConfigError` where it cannot be imported, is not trusted, or two plug-ins have its name.
    """
    if isinstance(section, ImportedPart):
        return load_code(section.target, key=f"{key}.target")
    if not isinstance(section, CustomPart):
        return load_code(section.builds, key=key)
    return section.given if section.given is not None else find(section.plugin_kind, section.type, f"{key}.type")


def find(kind: PluginKind, name: str, key: str) -> Any:
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
    if not isinstance(section, (CustomPart, ImportedPart)):
        return made(*args, section, **given)
    name, name_key, arguments, inside = _written(section, key)
    if accepts and not isinstance(made, type) and isinstance(made, accepts):
        if arguments:
            message = f"a {type(made).__name__} that is made already takes no arguments"
            raise ConfigError(Problem(f"{inside}.{next(iter(arguments))}", message, "Give them where it is made."))
        return made
    if not callable(made):
        message = f"{name!r} is a {type(made).__name__}, which cannot be called to make one"
        raise ConfigError(Problem(name_key, message, "Name a class, or a function that returns one."))
    return call(made, inside, *args, name=name, arguments=arguments, **given)


def make(section: Section, key: str, *args: Any, kind: type, **given: Any) -> Any:
    """What `build` makes, refused unless it is of `kind`, a class or a protocol; of a part it may be given, too."""
    made = build(section, key, *args, accepts=kind, **given)
    if isinstance(made, kind) and not isinstance(made, type):
        return made
    assert isinstance(section, (CustomPart, ImportedPart)), section.builds
    name, name_key, *_ = _written(section, key)
    what, where = f"{name!r} made a {type(made).__name__}, which is not a {kind.__name__}", _place(kind)
    if Protocol not in kind.__bases__:
        raise ConfigError(Problem(name_key, what, f"Return an object of a class derived from {where}."))
    needed = [each for each, value in vars(kind).items() if callable(value) and not each.startswith("_")]
    missing = [f"`{each}`" for each in needed if not callable(getattr(made, each, None))]
    raise ConfigError(Problem(name_key, f"{what}: it has no {listed(missing)}", f"Add it, as {where} says."))


def _place(kind: type) -> str:
    """Where users import a class from: the front door of its room, if it is there."""
    room = ".".join(kind.__module__.split(".")[:2])
    return f"{room if hasattr(sys.modules.get(room), kind.__name__) else kind.__module__}.{kind.__name__}"


def function(section: CustomPart, key: str, *takes: str) -> Callable[..., Any]:
    """The function that a section names, with the section's arguments, to be called with `takes` by position.

    A class is made with the arguments, and what it makes is the function.
    """
    made = load(section, key)
    name, arguments = str(section.type), section.arguments
    if isinstance(made, type):
        made, arguments = call(made, key, name=name, arguments=arguments), {}
    if not callable(made):
        message = f"{name!r} is a {type(made).__name__}, which cannot be called"
        raise ConfigError(Problem(f"{key}.type", message, f"Name a function of ({', '.join(takes)})."))
    _check_arguments(made, key, takes, name, arguments, {}, shown=takes)
    return partial(made, **arguments) if arguments else made


def _written(section: CustomPart | ImportedPart, key: str) -> tuple[str, str, dict[str, Any], str]:
    """A part's name and its key, its arguments and the key that they stand in."""
    if isinstance(section, ImportedPart):
        return str(section.target), f"{key}.target", section.args, f"{key}.args"
    return str(section.type), f"{key}.type", section.arguments, key


def call(
    function: Callable[..., Any], key: str, *args: Any, name: str, arguments: Mapping[str, Any], **given: Any
) -> Any:
    """Call a part with what Plait gives and with the user's `arguments`; what does not fit is a `ConfigError`."""
    if twice := next((each for each in arguments if each in given), None):
        raise ConfigError(Problem(f"{key}.{twice}", f"{name!r} is given {twice!r} by Plait", f"Leave out `{twice}`."))
    _check_arguments(function, key, args, name, arguments, given)
    try:
        return function(*args, **given, **arguments)
    except (PlaitError, MemoryError):
        raise
    except Exception as error:  # whatever a part of somebody else's raises while it is made
        if type(error).__name__ == "OutOfMemoryError":  # torch's: no matter of arguments, and answered elsewhere
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
        words = [*(shown or (f"<{type(each).__name__}>" for each in args)), *(f"{each}=…" for each in given)]
        message = f"{name!r} cannot be called as {name.rpartition(':')[2]}({', '.join(words)}): {error}"
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

    kind: str
    name: str
    target: str
    """`package.module:name`."""
    package: str
    """Name and version."""
    folder: str
    """Where the package lies."""
    problem: str = ""
    """Why its name cannot be used."""


def installed() -> list[Plugin]:
    """Every plug-in of every installed package, with what is wrong with its declaration. Imports none of them."""
    own = builtin_names(RunConfig)
    return [
        Plugin(kind, each.name, each.value, *_origin(each.dist), _problem(kind, each.name, several, own))
        for kind in plugin_kinds()
        for several in entry_points_of(kind).values()
        for each in several
    ]


def _problem(kind: str, name: str, several: Sequence[Any], own: Mapping[str, frozenset[str]]) -> str:
    if kind not in get_args(PluginKind):
        return f"plait.{kind} is not a kind of part. {choose(kind, get_args(PluginKind), 'kind')}"
    if kind in ("algorithm", "environment"):
        return "nothing in this version uses it"
    if name in own.get(kind, ()):
        return f"Plait's own {name} comes first: write {several[0].value} in a run description"
    if len(several) > 1:
        return "several packages bring this name: write the one you want as package.module:name"
    return ""


def _origin(distribution: Any) -> tuple[str, str]:
    if distribution is None:
        return "?", "?"
    return f"{distribution.name} {distribution.version}", str(Path(str(distribution.locate_file(""))).resolve())
