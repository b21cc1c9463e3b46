"""Dicts with attributes, and how one is put over another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from plait.config import choose
from plait.errors import ConfigError, Problem

DELETE = "_delete_"
"""A dict with this key replaces the one below it, rather than being put over it."""


class ConfigDict(dict[str, Any]):
    """A dict whose keys are attributes too, as are those of the dicts in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, wrapped(value))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no key {name!r}; {choose(name, self, 'key') if self else ''}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dict."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def copy(self) -> ConfigDict:
        """As of a dict: what lies in it is shared."""
        return ConfigDict(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts."""
        return {key: plain(value) for key, value in self.items()}


def wrapped(value: Any) -> Any:
    """Plain dicts anywhere in a value as ConfigDicts."""
    if type(value) is dict:
        return ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(wrapped(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """The opposite of `wrapped`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def merge(over: Mapping[str, Any], below: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """`over` put over `below`: dicts key by key, everything else replaced."""
    result = dict(below)
    for key, value in over.items():
        here = f"{path}.{key}" if path else str(key)
        old = result.get(key)
        if not isinstance(value, Mapping):
            result[key] = value
        elif isinstance(old, list | tuple) and value and all(str(k).isdigit() for k in value):
            result[key] = _merge_items(value, old, here)
        elif isinstance(old, Mapping) and not value.get(DELETE, False):
            result[key] = merge(value, old, path=here)
        elif old is None or isinstance(old, Mapping) or value.get(DELETE, False):
            result[key] = _without_marks(value)
        else:
            message = f"a dict is put over {old!r}, which is none"
            raise ConfigError(Problem(here, message, f"Write `{DELETE}=True` into it to replace that."))
    return result


def _merge_items(over: Mapping[str, Any], below: list[Any] | tuple[Any, ...], path: str) -> Any:
    """`{'0': …}` put over a list: by index."""
    items = list(below)
    for key, value in over.items():
        if int(key) >= len(items):
            _no_item(path, key, len(items))
        old = items[int(key)]
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        items[int(key)] = merge(value, old, path=f"{path}.{key}") if both else value
    return type(below)(items)


def _no_item(path: str, key: str, count: int) -> NoReturn:
    raise ConfigError(Problem(f"{path}.{key}", f"there are {count} items", f"Count from 0 to {count - 1}."))


def _without_marks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_marks(item) for key, item in value.items() if key != DELETE}
    return value
