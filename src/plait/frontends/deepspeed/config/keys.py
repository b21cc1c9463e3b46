"""The keys of a DeepSpeed configuration: the type of each value, and how a section of them is read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.config import choose, nearest, show
from plait.frontends import ABSENT, KeyReader, TranslatedSettings, honoured_as, refused_unless, unneeded

AUTO = "auto"
"""The value of a key whose value the script supplies."""

# ---- types of values


@dataclass(frozen=True, slots=True)
class ValueType:
    """A set of values, and how messages describe it."""

    description: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number, also as a float: JSON reads `2e8` as one."""
    return _is_number(value) and value == int(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


FLAG = ValueType("true or false", lambda value: isinstance(value, bool))
COUNT = ValueType("a whole number from 1", lambda value: _is_whole(value) and value >= 1)
SIZE = ValueType("a whole number from 0", lambda value: _is_whole(value) and value >= 0)
WHOLE = ValueType("a whole number", _is_whole)
NUMBER = ValueType("a number", _is_number)
SHARE = ValueType("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
PAIR = ValueType(
    "a list of two numbers",
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)),
)
TEXT = ValueType("a text", lambda value: isinstance(value, str))
PATH = ValueType("a path", lambda value: isinstance(value, str | os.PathLike))
TEXTS = ValueType("a list of texts", _is_texts)
TEXT_OR_TEXTS = ValueType("a text or a list of texts", lambda value: isinstance(value, str) or _is_texts(value))
SECTION = ValueType(
    "a section with keys", lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
)
ANY = ValueType("anything", lambda value: True)

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}


def dtype_name(value: Any) -> str | None:
    """Return Plait's name (`fp32`, `fp16`, `bf16`) of a dtype, given by any of its names or as a `torch.dtype`."""
    return _DTYPES.get(str(value).lower().removeprefix("torch."))


DTYPE = ValueType("a format such as fp16, bf16 or fp32", lambda value: dtype_name(value) is not None)


def one_of(*choices: Any) -> ValueType:
    """Return the type of values that are one of these words, in any case."""
    folded = {str(choice).lower() for choice in choices}
    return ValueType(
        f"one of {', '.join(map(str, choices))}", lambda value: isinstance(value, str) and value.lower() in folded
    )


def either(*types: ValueType) -> ValueType:
    """Return the type of values that any of these types accepts."""
    description = " or ".join(item.description for item in types)
    return ValueType(description, lambda value: any(item.accepts(value) for item in types))


# ---- the keys


class DeepSpeedSettings(TranslatedSettings):
    """The state of one translation, in which readers can see the other keys of the configuration."""

    def __init__(self, config: Mapping[str, Any], homes: Mapping[str, str], hints: Mapping[str, str]) -> None:
        """`homes`: key → its section, for keys often misplaced. `hints`: remedies for keys of other frameworks."""
        super().__init__()
        self._config, self._homes, self._hints = config, homes, hints

    def given(self, path: str) -> Any:
        """Return the value of a dotted key of the configuration; None if it is absent, null or `auto`."""
        value: Any = self._config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value == AUTO else value

    def is_on(self, path: str) -> bool:
        """Return whether a switch of the configuration is present and true."""
        return self.given(path) is True

    def implied(self, key: str, text: str) -> None:
        """Record the effect of a key that is absent or `auto`: a default of DeepSpeed that differs from Plait's."""
        entries = self.report.entries
        index = next((i for i, entry in enumerate(entries) if entry.key == key and entry.value == AUTO), None)
        if index is None:
            value = self.given(key)
            self.mapped(key, ABSENT if value is None else value, text)
        else:
            entries[index] = replace(entries[index], text=f"left open: {text}")

    def read(self, section: Mapping[str, Any], readers: Mapping[str, KeyReader[Any]], prefix: str = "") -> None:
        """Call the reader of every key of a section; an empty section is recorded as unneeded."""
        if prefix and not section:
            self.unneeded(prefix, section, "an empty section says nothing")
        super().read(section, readers, prefix)

    def unknown(self, key: str, readers: Mapping[str, KeyReader[Any]]) -> None:
        """Record a comment as unneeded; for any other unknown key, a problem with the remedy that fits best."""
        path, _, name = key.rpartition(".")
        if name.startswith(("//", "_")) or name == "comment":  # DeepSpeed has no such keys
            self.unneeded(key, "…", "a comment")
            return
        closest = nearest(name, readers)
        if name in self._hints and (not path or closest is None):
            remedy = self._hints[name]
        elif name in self._homes and self._homes[name] != path:
            remedy = f"It belongs in `{self._homes[name]}`."
        elif path and name in self._homes.values():
            remedy = "It belongs at the top."
        elif len(readers) <= 12:
            remedy = choose(name, readers, "key")
        else:
            remedy = f"Did you mean `{closest}`?" if closest else "Leave it out."
        self.wrong(key, f"{f'`{path}`' if path else 'DeepSpeed'} has no such key", remedy)


Reader = KeyReader[DeepSpeedSettings]
_LEFT_OPEN = "left open, as if it were not there: the default holds"


@dataclass(frozen=True, slots=True)
class Key:
    """The reader of one key, which first checks the type of the value."""

    takes: ValueType
    reader: Reader
    if_auto: str = _LEFT_OPEN
    """What `auto` means for the key."""
    auto_is_a_value: bool = False
    """Whether `auto` is one of the key's values in DeepSpeed, not a value that the script supplies."""

    def __call__(self, settings: DeepSpeedSettings, key: str, value: Any) -> None:
        """Translate a value; null and `auto` mean the default, and a value of a wrong type is a problem."""
        if value is None:
            settings.unneeded(key, value, "null is the same as leaving it out")
        elif value == AUTO and not self.auto_is_a_value:
            settings.mapped(key, value, self.if_auto)
        elif not self.takes.accepts(value):
            settings.wrong(key, f"{show(value)} is not {self.takes.description}", f"Write {self.takes.description}.")
        else:
            self.reader(settings, key, value)


Table = Mapping[str, Key]


def setting(path: str, takes: ValueType, *, if_auto: str = _LEFT_OPEN) -> Key:
    """Return a reader that sets `path` of the run description to the same value."""
    return Key(takes, honoured_as(path, _plain), if_auto)


def same_keys(names: str, takes: ValueType, reader: Reader) -> dict[str, Key]:
    """Return key → reader for several keys with the same reader; `names` are separated by spaces."""
    return dict.fromkeys(names.split(), Key(takes, reader))


def _plain(value: Any) -> Any:
    """Return a float that is a whole number (`2e8`) as an int, a tuple as a list, any other value unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1:
        return int(value)
    return list(value) if isinstance(value, tuple) else value


def refused_if_on(remedy: str) -> Key:
    """Return a reader for the switch of an unsupported feature: unneeded while it is off, refused when on."""
    return Key(FLAG, refused_unless(remedy, False, why="it is off, here as there"))


def mapped_if_on(text: str, path: str = "", value: Any = True, *, if_off: str = "it is off") -> Key:
    """Return a reader for a switch with an equivalent in Plait: when on, it sets `path` (if given) to `value`."""

    def read(settings: DeepSpeedSettings, key: str, switch: bool) -> None:
        if not switch:
            settings.unneeded(key, switch, if_off)
            return
        if path:
            settings.set(path, value, key)
        settings.mapped(key, switch, text)

    return Key(FLAG, read)


def section(table: Table) -> Key:
    """Return a reader for a section with these keys."""
    return Key(SECTION, lambda settings, key, value: settings.read(value, table, key))


def switched_section(table: Table, what: str, if_on: Reader | None = None) -> Key:
    """Return a reader for a section with an `enabled`: unless that is true, its other keys are unneeded."""

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        if value.get("enabled") is True:
            settings.read(value, table, key)
            if if_on is not None:
                if_on(settings, key, value)
        else:
            settings.read(value, all_unneeded(table, f"{what} off"), key)

    return Key(SECTION, read)


def all_unneeded(table: Table, why: str) -> dict[str, Key]:
    """Return readers that record these keys as unneeded, but still check the types of their values."""
    return {name: replace(key, reader=unneeded(why)) for name, key in table.items()}


def unsupported_section(what: str, remedy: str, names: str = "") -> Key:
    """Return a reader for the section of an unsupported feature: unneeded while it is off, refused otherwise.

    For a section with an `enabled` (off by default), `names` lists its other keys, separated by spaces; a key that is
    not among them is a problem.
    """

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        known = ("enabled", *names.split())
        for name in value if names and isinstance(value, Mapping) else ():
            if name not in known:
                settings.wrong(f"{key}.{name}", f"`{key}` has no such key", choose(name, known, "key"))
        enabled = value.get("enabled", not names) if isinstance(value, Mapping) else value
        if not enabled or enabled == AUTO:
            settings.unneeded(key, value, f"{what} off, here as there")
        else:
            settings.refused(key, value, remedy)

    return Key(either(SECTION, FLAG), read)
