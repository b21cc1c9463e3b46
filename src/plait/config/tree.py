"""The shape of a run description: what may stand at a path, read off the section classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from plait.config.base import Section
from plait.config.part import Part, is_part


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, with `Annotated` and `None` taken away."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from members(each)
    elif annotation not in (None, NoneType):
        yield annotation


def sections(annotation: Any) -> dict[str, type[Section]]:
    """The sections that may stand here, by their `type`; one that has no `type` is under the empty name.

    A part of the user's own has no `type` of its own: see `open_part`.
    """
    found = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Section) and not issubclass(member, Part):
            tag = member.model_fields.get("type")
            found[tag.default if tag else ""] = member
    return found


def open_part(annotation: Any) -> type[Part] | None:
    """What describes a part of the user's own here, where one may stand."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, Part)), None)


def section(annotation: Any, value: Any) -> type[Section] | None:
    """The section that `value` is written for, where that can be told."""
    choices, part = sections(annotation), open_part(annotation)
    if "" in choices:
        return choices[""]
    if part is not None and not isinstance(value, Mapping):
        return None if isinstance(value, str) and value in literals(annotation) else part
    tag = value.get("type") if isinstance(value, Mapping) else None
    own = choices.get(tag) if isinstance(tag, str) else None
    return own or (part if part and is_part(part, tag) else None)


def keys(value: Any) -> tuple[str, ...]:
    """The keys of a section object; none of anything else."""
    return tuple(type(value).model_fields) if isinstance(value, Section) else ()


def settings(value: Section) -> dict[str, Any]:
    """The keys and values of a section; of a part of the user's own also those that are its arguments."""
    further = value.arguments if isinstance(value, Part) else {}
    return {name: getattr(value, name) for name in type(value).model_fields} | further


def field(annotation: Any, value: Any, key: Any) -> FieldInfo | None:
    """The field that `key` names in the section that `value` is written for."""
    owner = section(annotation, value)
    return owner.model_fields.get(key) if owner and isinstance(key, str) else None


def own_words(annotation: Any) -> dict[str, frozenset[str]]:
    """For each kind of part that may be the user's own, somewhere in there, the words for Plait's own."""
    found: dict[str, frozenset[str]] = {}
    part = open_part(annotation)
    if part is not None:
        words = frozenset([*sections(annotation), *map(str, literals(annotation)), *part.own, *part.short])
        found[part.kind] = found.get(part.kind, frozenset()) | words
    inner = [info.annotation for owner in sections(annotation).values() for info in owner.model_fields.values()]
    for each in [*inner, *items(annotation)]:
        for kind, words in own_words(each).items():
            found[kind] = found.get(kind, frozenset()) | words
    return found


def items(annotation: Any) -> tuple[Any, ...]:
    """The annotations of the entries of a list: one for any number of them, or one each."""
    for member in members(annotation):
        if get_origin(member) is tuple:
            return tuple(each for each in get_args(member) if each is not Ellipsis)
    return ()


def item(annotation: Any, index: int) -> Any:
    """The annotation of one entry of a list."""
    each = items(annotation)
    return each[min(index, len(each) - 1)] if each else None


def literals(annotation: Any) -> tuple[Any, ...]:
    """The words that may stand here."""
    return tuple(word for member in members(annotation) if get_origin(member) is Literal for word in get_args(member))


def homes(key: str, annotation: Any, path: str = "") -> Iterator[str]:
    """Every path of a section that knows `key`."""
    for owner in sections(annotation).values():
        if key in owner.model_fields:
            yield path
        for name, info in owner.model_fields.items():
            yield from homes(key, info.annotation, f"{path}.{name}" if path else name)
    for each in items(annotation):
        yield from homes(key, each, f"{path}.N")
