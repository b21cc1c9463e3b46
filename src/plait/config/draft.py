"""A run description while it is put together: plain values, and where each of them came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from plait.config.base import RefusedError, Section, Shorthand
from plait.config.part import Part, is_part
from plait.config.run import RunConfig
from plait.config.text import show, whole_number
from plait.errors import Problem

# The shape of a run description: what may stand at a path, read off the section classes.


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


def keys_of(value: Any) -> tuple[str, ...]:
    """The keys of a section object; none of anything else."""
    return tuple(type(value).model_fields) if isinstance(value, Section) else ()


def settings_of_section(value: Section) -> dict[str, Any]:
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


Keys = tuple[Any, ...]


def dotted(keys: Keys) -> str:
    """`("hooks", 0, "decay")` as `hooks.0.decay`."""
    return ".".join(str(key) for key in keys)


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at `path` came from; that of the nearest one around it where itself was not written."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, "")


def _plain(value: Any) -> Any:
    """A copy that can be changed; a section becomes the keys that were set in it."""
    if isinstance(value, Section):
        settings = settings_of_section(value)
        return {
            name: _plain(each) for name, each in settings.items() if name == "type" or name in value.model_fields_set
        }
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_plain(each) for each in value])
    return value


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


class Draft:
    """Takes values one by one, later ones over earlier ones, and keeps their origins.

    A shorthand is expanded when something is put inside it, and everywhere by `expand`; `written` remembers
    the path that the user wrote for each key that came out of one.
    """

    def __init__(self) -> None:
        self.data: Any = {}
        self.origins: dict[str, str] = {}
        self.written: dict[str, str] = {}
        self.problems: list[Problem] = []

    def put(self, keys: Keys, value: Any, origin: str) -> None:
        """Set the value at `keys`, making the sections on the way; what cannot be set is a problem."""
        value = _plain(value)
        node: Any = self.data
        annotation: Any = RunConfig
        for depth, key in enumerate(keys):
            path = dotted(keys[:depth])
            if isinstance(node, list) and (index := self._index(node, key, path, origin)) is not None:
                key = index
            elif not isinstance(node, dict):
                return
            info = field(annotation, node, key)
            annotation = item(annotation, key) if isinstance(node, list) else info and info.annotation
            if depth == len(keys) - 1:
                self._assign(node, key, value)
                self._mark(keys, value, origin)
                return
            default = info.get_default(call_default_factory=True) if info else None
            inner = self._opened(node, key, annotation, default, keys[: depth + 1], origin)
            if inner is None:
                return
            self._assign(node, key, inner)
            node = inner

    def expand(self) -> None:
        """Expand every shorthand there is."""
        self.data = self._expanded(self.data, RunConfig, ())

    def _index(self, node: list[Any], key: Any, path: str, origin: str) -> int | None:
        index = whole_number(str(key))
        if index is not None and index <= len(node):
            return index
        numbers = f"0 to {len(node) - 1}, or {len(node)} to add one" if node else "0, to add the first one"
        message = f"no entry {show(key)} in a list of {len(node)}"
        self.problems.append(Problem(f"{path}.{key!s:.40}", message, f"The entries are {numbers}.", origin))
        return None

    def _assign(self, node: Any, key: Any, value: Any) -> None:
        if isinstance(node, list) and key == len(node):
            node.append(value)
        else:
            node[key] = value

    def _opened(
        self, node: Any, key: Any, annotation: Any, default: Any, keys: Keys, origin: str
    ) -> dict[Any, Any] | list[Any] | None:
        """What is at `key`, as something that a value can be put into; None where it cannot be."""
        present = key < len(node) if isinstance(node, list) else key in node
        value = node[key] if present else None
        if value is None:
            self.origins.setdefault(dotted(keys), origin)
            value = list(default or ()) if items(annotation) else {}
        if isinstance(value, dict) and "type" in keys_of(default):
            value.setdefault("type", default.type)  # so that what is set inside is known for what it is
        if not isinstance(value, (dict, list, tuple)):
            value = self._expanded_here(value, annotation, keys)
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, (dict, list)):
            return value
        if not isinstance(value, RefusedError):  # a refused word is reported with the section itself
            message = f"nothing can be set inside it: it holds {show(value)}"
            self.problems.append(Problem(dotted(keys), message, "Set the value itself, or leave it out.", origin))
        return None

    def _expanded_here(self, value: Any, annotation: Any, keys: Keys) -> Any:
        """What `value` is short for, by the one section that may stand there, or what refused it."""
        owner = section(annotation, value)
        if owner is None or not issubclass(owner, Shorthand):
            return value
        try:
            expanded = _plain(owner.expand(value))
        except RefusedError as refused:
            return refused
        if isinstance(expanded, dict):
            path = dotted(keys)
            for key in expanded:
                inner = f"{path}.{key}" if path else str(key)
                if inner not in self.origins and path in self.origins:
                    self._mark((*keys, key), expanded[key], self.origins[path])
                if not isinstance(value, dict):
                    self.written[inner] = self.written.get(path, path)
        return expanded

    def _expanded(self, value: Any, annotation: Any, keys: Keys) -> Any:
        expanded = self._expanded_here(value, annotation, keys)
        if isinstance(expanded, RefusedError):
            return value
        if isinstance(expanded, dict):
            for key in expanded:
                if info := field(annotation, expanded, key):
                    expanded[key] = self._expanded(expanded[key], info.annotation, (*keys, key))
        elif isinstance(expanded, list):
            each = [item(annotation, index) for index in range(len(expanded))]
            return [self._expanded(v, each[i], (*keys, i)) for i, v in enumerate(expanded)]
        return expanded

    def _mark(self, keys: Keys, value: Any, origin: str) -> None:
        """Remember where the value at `keys` and all inside it came from, and forget what was there."""
        path = dotted(keys)
        for book in (self.origins, self.written):
            for known in [known for known in book if known == path or known.startswith(f"{path}.")]:
                del book[known]
        self.origins[path] = origin
        for key, each in _entries(value):
            self._mark((*keys, key), each, origin)
