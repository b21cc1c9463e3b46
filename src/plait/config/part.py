"""Custom parts: sections for a user's own classes and functions.

[Note: one way in]
Wherever a section is open, `type` may be one of Plait's names, `package.module:name`, or the name of an installed
plug-in (an entry point of the group `plait.<kind>`); from Python it may also be the object itself, or a class or
function that returns one. Every other key of such a section is an argument for that class or function. Nothing is
imported here: `plait.plugins` loads a part, in the processes that train.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, field_validator

from plait.config.base import RefusedError, Section, Shorthand, Target
from plait.config.text import choose, show
from plait.config.trust import STORED_IN, StoredName, entry_points_of
from plait.errors import Problem

PluginKind = Literal[
    "optimizer",
    "schedule",
    "model",
    "data",
    "collate",
    "objective",
    "loss",
    "hook",
    "metric",
    "sink",
    "engine",
    "precision",
    "recompute",
    "pipeline_schedule",
    "tensor_plan",
    "launcher",
    "storage",
    "converter",
    "reward",
    "algorithm",
    "environment",
]
"""What a plug-in may provide. Its entry-point group is `plait.<kind>`."""


_FORM = "Write a custom one as package.module:name."


class GivenName(str):
    """The name of a part that a script gave as an object, with that object. A copy in another process lacks it."""

    given: Any

    def __new__(cls, given: Any) -> GivenName:
        """The name is `module:name` where that is importable, else the object's class in angle brackets."""
        made = super().__new__(cls, _name_of(given))
        made.given = given
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __copy__(self) -> GivenName:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> GivenName:
        return self


def _name_of(given: Any) -> str:
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module != "__main__":
        target: Any = sys.modules.get(module)
        for attribute in name.split("."):
            target = getattr(target, attribute, None)
        if target is given:
            return f"{module}:{name}"
    return f"<{module}.{name}>" if name else f"<{type(given).__module__}.{type(given).__qualname__}>"


def _keep_given(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
    if isinstance(value, GivenName):
        return value
    name: str = check(value)
    stored_in = value.stored_in if isinstance(value, StoredName) else (info.context or {}).get(STORED_IN)
    return name if stored_in is None else StoredName(name, stored_in)


class CustomPart(Shorthand):
    """A custom part: its name in `type`, and its arguments as further keys."""

    model_config = ConfigDict(extra="allow")

    plugin_kind: ClassVar[PluginKind]
    builtin: ClassVar[tuple[str, ...]] = ()
    """The names of Plait's own parts of this kind."""
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Short names of other libraries' parts → `package.module:name`."""

    type: Annotated[str, WrapValidator(_keep_given)]

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        if is_custom(cls, name):
            return name if isinstance(name, GivenName) else cls.aliases.get(name, name)
        if name in cls.builtin:
            raise RefusedError(f"{name} takes no further keys here", f"Write the word alone: `{name}`.")
        raise RefusedError(
            f"unknown {cls.plugin_kind.replace('_', ' ')} {show(name)}", choose_type(cls.plugin_kind, name, cls.builtin)
        )

    def __str__(self) -> str:
        return str(self.type)

    @property
    def arguments(self) -> dict[str, Any]:
        """The further keys, which are the part's arguments."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def given(self) -> Any:
        """The object that a script gave; None where the part is named."""
        return self.type.given if isinstance(self.type, GivenName) else None

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A name is the `type`, and so is an object that is not a section."""
        if isinstance(value, Mapping) and _is_object(value.get("type")):
            return {**value, "type": GivenName(value["type"])}
        if isinstance(value, str):
            return {"type": value}
        return {"type": GivenName(value)} if _is_object(value) else value


class ImportedPart(Section):
    """A part in the older form: `{type: import, target: package.module:name, args: {…}}`."""

    type: Literal["import"] = "import"
    target: Target
    """`package.module:name`, which may be the `type` itself."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


def _is_object(value: Any) -> bool:
    """Return whether a value is a Python object that a configuration file cannot contain."""
    return value is not None and not isinstance(value, (str, Mapping, Section, bool, int, float, list, tuple))


def is_custom(custom: type[CustomPart], name: Any) -> bool:
    """Whether a `type` names a custom part, not one of Plait's. Imports nothing."""
    if not isinstance(name, str):
        return _is_object(name)
    if name in custom.builtin:  # checked first, as looking up plug-ins is slow
        return False
    if isinstance(name, GivenName) or ":" in name or name.startswith("<"):
        return True
    return name in custom.aliases or name in entry_points_of(custom.plugin_kind)


def objects_without_name(names: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Return a problem for each path and value that names an object of another process."""
    return [
        Problem(path, f"{name} was an object of a script, and cannot be imported", "Give it again from Python.")
        for path, name in names
        if path.endswith("type") and isinstance(name, str) and name[:1] == "<" and not isinstance(name, GivenName)
    ]


def choose_type(plugin_kind: PluginKind, name: Any, builtin: Iterable[str]) -> str:
    """Return the remedy for an unknown name of this kind."""
    known = [*builtin, *entry_points_of(plugin_kind)]
    return f"{choose(name, known, 'type')} A custom one is package.module:name." if known else _FORM


BUILTIN_TAG, CUSTOM_TAG = "own", "part"
"""Tags of the two sides of a union: Plait's sections, and custom parts."""


def builtin_or_custom(custom: type[CustomPart]) -> Callable[[Any], str]:
    """Return the function of a `Discriminator` between Plait's sections (`BUILTIN_TAG`) and `custom` (`CUSTOM_TAG`)."""

    def tag(value: Any) -> str:
        name = value.get("type") if isinstance(value, Mapping) else None
        if len(custom.builtin) == 1 and isinstance(value, Mapping):  # no union, whose error lists the types
            return BUILTIN_TAG if name in custom.builtin else CUSTOM_TAG
        return CUSTOM_TAG if isinstance(value, custom) or is_custom(custom, name) else BUILTIN_TAG

    return tag


def name_or_custom(custom: type[CustomPart]) -> Callable[[Any], str]:
    """The same between Plait's names (`BUILTIN_TAG`) and `custom` (`CUSTOM_TAG`)."""

    def tag(value: Any) -> str:
        if isinstance(value, (str, bool, int, float, list, tuple)) or value is None:
            return CUSTOM_TAG if is_custom(custom, value) else BUILTIN_TAG
        return CUSTOM_TAG

    return tag


def mapping_or_custom(custom: type[CustomPart]) -> Callable[[Any], str]:
    """The same between a plain mapping (`BUILTIN_TAG`) and `custom` (`CUSTOM_TAG`)."""

    def tag(value: Any) -> str:
        if isinstance(value, Mapping):
            return CUSTOM_TAG if is_custom(custom, value.get("type")) else BUILTIN_TAG
        return BUILTIN_TAG if value is None or isinstance(value, (bool, int, float, list, tuple)) else CUSTOM_TAG

    return tag
