"""The shape of a run description: what may stand at a path, read off the section classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from plait.config.base import Section
from plait.config.part import CustomPart, is_custom


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, with `Annotated` and `None` taken away."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from members(argument)
    elif annotation not in (None, NoneType):
        yield annotation


def sections(annotation: Any) -> dict[str, type[Section]]:
    """The sections that may stand here, by their `type`; one that has no `type` is under the empty name.

    A part of the user's own has no `type` of its own: see `custom_section`.
    """
    by_type = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Section) and not issubclass(member, CustomPart):
            tag = member.model_fields.get("type")
            by_type[tag.default if tag else ""] = member
    return by_type


def custom_section(annotation: Any) -> type[CustomPart] | None:
    """What describes a part of the user's own here, where one may stand."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, CustomPart)), None)


def section(annotation: Any, value: Any) -> type[Section] | None:
    """The section that `value` is written for, where that is known."""
    choices, custom = sections(annotation), custom_section(annotation)
    if "" in choices:
        return choices[""]
    if custom is not None and not isinstance(value, Mapping):
        return None if isinstance(value, str) and value in literals(annotation) else custom
    tag = value.get("type") if isinstance(value, Mapping) else None
    builtin = choices.get(tag) if isinstance(tag, str) else None
    return builtin or (custom if custom and is_custom(custom, tag) else None)


def keys_of(value: Any) -> tuple[str, ...]:
    """The keys of a section object; none of anything else."""
    return tuple(type(value).model_fields) if isinstance(value, Section) else ()


def settings_of_section(value: Section) -> dict[str, Any]:
    """The keys and values of a section; of a part of the user's own also those that are its arguments."""
    further = value.arguments if isinstance(value, CustomPart) else {}
    return {name: getattr(value, name) for name in type(value).model_fields} | further


def field(annotation: Any, value: Any, key: Any) -> FieldInfo | None:
    """The field that `key` names in the section that `value` is written for."""
    owner = section(annotation, value)
    return owner.model_fields.get(key) if owner and isinstance(key, str) else None


def builtin_names(annotation: Any) -> dict[str, frozenset[str]]:
    """For each kind of part that may be the user's own, somewhere in there, the words for Plait's own."""
    names_of: dict[str, frozenset[str]] = {}
    custom = custom_section(annotation)
    if custom is not None:
        names = frozenset([*sections(annotation), *map(str, literals(annotation)), *custom.builtin, *custom.aliases])
        names_of[custom.plugin_kind] = names_of.get(custom.plugin_kind, frozenset()) | names
    inner = [info.annotation for owner in sections(annotation).values() for info in owner.model_fields.values()]
    for argument in [*inner, *items(annotation)]:
        for plugin_kind, names in builtin_names(argument).items():
            names_of[plugin_kind] = names_of.get(plugin_kind, frozenset()) | names
    return names_of


def items(annotation: Any) -> tuple[Any, ...]:
    """The annotations of the entries of a list: one for any number of them, or one each."""
    for member in members(annotation):
        if get_origin(member) is tuple:
            return tuple(item for item in get_args(member) if item is not Ellipsis)
    return ()


def item(annotation: Any, index: int) -> Any:
    """The annotation of one entry of a list."""
    annotations = items(annotation)
    return annotations[min(index, len(annotations) - 1)] if annotations else None


def literals(annotation: Any) -> tuple[Any, ...]:
    """The words that may stand here."""
    return tuple(value for member in members(annotation) if get_origin(member) is Literal for value in get_args(member))


def paths_with_key(key: str, annotation: Any, path: str = "") -> Iterator[str]:
    """Every path of a section that knows `key`."""
    for owner in sections(annotation).values():
        if key in owner.model_fields:
            yield path
        for name, info in owner.model_fields.items():
            yield from paths_with_key(key, info.annotation, f"{path}.{name}" if path else name)
    for item_annotation in items(annotation):
        yield from paths_with_key(key, item_annotation, f"{path}.N")


Keys = tuple[Any, ...]


def dotted(keys: Keys) -> str:
    """`("hooks", 0, "decay")` as `hooks.0.decay`."""
    return ".".join(str(key) for key in keys)


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at `path` came from; that of the nearest one around it where itself was not written."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, "")
