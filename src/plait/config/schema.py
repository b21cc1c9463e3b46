"""Looks up what a run description may contain at each path, in the annotations of the section classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from plait.config.base import Section
from plait.config.part import CustomPart, is_custom


def members(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation, without `Annotated` and `None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from members(argument)
    elif annotation not in (None, NoneType):
        yield annotation


def sections(annotation: Any) -> dict[str, type[Section]]:
    """Return the allowed sections by their `type`; one without a `type` has the empty name.

    Custom parts have no fixed `type`: see `custom_section`.
    """
    by_type = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Section) and not issubclass(member, CustomPart):
            tag = member.model_fields.get("type")
            by_type[tag.default if tag else ""] = member
    return by_type


def custom_section(annotation: Any) -> type[CustomPart] | None:
    """Return the section of custom parts, where they are allowed."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, CustomPart)), None)


def section_for(annotation: Any, value: Any) -> type[Section] | None:
    """Return the section that `value` is written for, where that is known."""
    choices, custom = sections(annotation), custom_section(annotation)
    if "" in choices:
        return choices[""]
    if custom is not None and not isinstance(value, Mapping):
        return None if isinstance(value, str) and value in literals(annotation) else custom
    tag = value.get("type") if isinstance(value, Mapping) else None
    builtin = choices.get(tag) if isinstance(tag, str) else None
    return builtin or (custom if custom and is_custom(custom, tag) else None)


def keys_of(value: Any) -> tuple[str, ...]:
    """Return the keys of a section object; of other values none."""
    return tuple(type(value).model_fields) if isinstance(value, Section) else ()


def settings_of_section(value: Section) -> dict[str, Any]:
    """Return the keys and values of a section; of a custom part also its arguments."""
    further = value.arguments if isinstance(value, CustomPart) else {}
    return {name: getattr(value, name) for name in type(value).model_fields} | further


def field(annotation: Any, value: Any, key: Any) -> FieldInfo | None:
    """Return the field that `key` names in the section that `value` is written for."""
    owner = section_for(annotation, value)
    return owner.model_fields.get(key) if owner and isinstance(key, str) else None


def builtin_names(annotation: Any) -> dict[str, frozenset[str]]:
    """Return kind of plug-in → the names of Plait's own parts of this kind, for all kinds inside an annotation."""
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
    """Return the annotations of the entries of a list: one for any number of entries, or one per entry."""
    for member in members(annotation):
        if get_origin(member) is tuple:
            return tuple(item for item in get_args(member) if item is not Ellipsis)
    return ()


def item(annotation: Any, index: int) -> Any:
    """Return the annotation of one entry of a list."""
    annotations = items(annotation)
    return annotations[min(index, len(annotations) - 1)] if annotations else None


def literals(annotation: Any) -> tuple[Any, ...]:
    """Return the allowed literal values."""
    return tuple(value for member in members(annotation) if get_origin(member) is Literal for value in get_args(member))


def paths_with_key(key: str, annotation: Any, path: str = "") -> Iterator[str]:
    """Yield every path of a section with the key `key`."""
    for owner in sections(annotation).values():
        if key in owner.model_fields:
            yield path
        for name, info in owner.model_fields.items():
            yield from paths_with_key(key, info.annotation, f"{path}.{name}" if path else name)
    for item_annotation in items(annotation):
        yield from paths_with_key(key, item_annotation, f"{path}.N")


Keys = tuple[Any, ...]


def dotted(keys: Keys) -> str:
    """Return keys as a path: `hooks.0.decay` for `("hooks", 0, "decay")`."""
    return ".".join(str(key) for key in keys)


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return the origin of the value at `path`; that of the nearest section around it where it has none."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, "")
