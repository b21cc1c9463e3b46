"""One translation under way: what was read, what became of it, what is wrong with it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plait.config import choose, nearest, show
from plait.errors import Problem
from plait.frontends import ABSENT, KeyOutcome, KeyReport

# What values a key takes.


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A set of values, and how a sentence calls them."""

    words: str
    has: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    """`2e8` is a float to every reader, and a fine count all the same."""
    return _number(value) and value == int(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
COUNT = ValueKind("a whole number from 1", lambda value: _whole(value) and value >= 1)
SIZE = ValueKind("a whole number from 0", lambda value: _whole(value) and value >= 0)
WHOLE = ValueKind("a whole number", _whole)
NUMBER = ValueKind("a number", _number)
SHARE = ValueKind("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
PAIR = ValueKind(
    "a list of two numbers",
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_number, value)),
)
TEXT = ValueKind("a text", lambda value: isinstance(value, str))
PATH = ValueKind("a path", lambda value: isinstance(value, str | os.PathLike))
TEXTS = ValueKind("a list of texts", _texts)
TEXT_OR_TEXTS = ValueKind("a text or a list of texts", lambda value: isinstance(value, str) or _texts(value))
SECTION = ValueKind(
    "a section with keys", lambda value: isinstance(value, Mapping) and all(isinstance(k, str) for k in value)
)
ANY = ValueKind("anything", lambda value: True)


def one_of(*choices: Any) -> ValueKind:
    """Words of a closed list, in any case."""
    folded = {str(choice).lower() for choice in choices}
    return ValueKind(
        f"one of {', '.join(map(str, choices))}", lambda value: isinstance(value, str) and value.lower() in folded
    )


def either(*kinds: ValueKind) -> ValueKind:
    """A value of any of these kinds."""
    return ValueKind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.has(value) for kind in kinds))


FORMATS = {
    "fp32": "fp32",
    "float32": "fp32",
    "torch.float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "torch.float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}
"""DeepSpeed's names of a number format, and Plait's."""
FORMAT = ValueKind("a format such as fp16, bf16 or fp32", lambda value: named_format(value) is not None)


def named_format(value: Any) -> str | None:
    """Plait's name of a format; torch's own objects are known by their names."""
    return FORMATS.get(str(value).lower())


AUTO = "auto"


@dataclass(slots=True)
class Work:
    """The configuration, and everything that the keys of it turn into."""

    config: Mapping[str, Any]
    world_size: int | None = None
    homes: Mapping[str, str] = field(default_factory=dict)
    """The section that a key belongs in, for keys that stand somewhere else."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """What to write instead of a word that other frameworks have at the top."""
    sections: dict[str, Any] = field(default_factory=dict)
    report: KeyReport = field(default_factory=KeyReport)
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """For each dotted key of the run description, the DeepSpeed key that it came from."""

    def look(self, path: str) -> Any:
        """The value of a dotted key; None where it is absent, null or left open with `auto`."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value == AUTO else value

    def on(self, path: str) -> bool:
        """Whether a switch is there and true."""
        return self.look(path) is True

    def put(self, path: str, value: Any, source: str) -> None:
        """Set a dotted key of the run description."""
        place = self.sections
        *names, last = path.split(".")
        for name in names:
            place = place.setdefault(name, {})
        place[last] = value
        self.sources[path] = source

    def wrong(self, key: str, message: str, remedy: str = "") -> None:
        """Write down a problem; all of them are raised together."""
        self.problems.append(Problem(key, message, remedy))

    def honour(self, key: str, value: Any, text: str) -> None:
        """The key does here what it does there."""
        self.report.add(KeyOutcome.HONOURED, key, value, text)

    def map(self, key: str, value: Any, text: str) -> None:
        """Something here does the same, or nearly."""
        self.report.add(KeyOutcome.MAPPED, key, value, text)

    def leave(self, key: str, value: Any, text: str) -> None:
        """The key has no meaning here, and `text` says why that is safe."""
        self.report.add(KeyOutcome.UNNEEDED, key, value, text)

    def refuse(self, key: str, value: Any, text: str) -> None:
        """The key cannot be had, and `text` says what to write instead."""
        self.report.add(KeyOutcome.REFUSED, key, value, text)

    def imply(self, key: str, text: str) -> None:
        """A key that is absent or left open means something all the same: a default that is not Plait's."""
        entries = self.report.entries
        open_ = next((index for index, entry in enumerate(entries) if entry.key == key and entry.value == AUTO), None)
        if open_ is None:
            found = self.look(key)
            self.map(key, ABSENT if found is None else found, text)
        else:
            entries[open_] = replace(entries[open_], text=f"left open: {text}")

    def walk(self, path: str, section: Mapping[str, Any], table: Table) -> None:
        """Answer every key of a section with the help of its table."""
        if path and not section:
            self.leave(path, section, "an empty section says nothing")
        for name, value in section.items():
            key = f"{path}.{name}" if path else name
            known = table.get(name)
            if known is None:
                self._unknown(key, name, path, table)
            elif value is None:
                self.leave(key, value, "null is the same as leaving it out")
            elif value == AUTO and not known.knows_auto:
                self.map(key, value, known.if_open or "left open, as if it were not there: the default holds")
            elif not known.kind.has(value):
                self.wrong(key, f"{show(value)} is not {known.kind.words}", f"Write {known.kind.words}.")
            else:
                known.act(self, key, value)

    def _unknown(self, key: str, name: str, path: str, table: Table) -> None:
        if name.startswith(("//", "_")) or name == "comment":  # no key of DeepSpeed's begins so
            self.leave(key, "…", "a comment")
            return
        where = f"`{path}` has" if path else "DeepSpeed has"
        meant = nearest(name, table)
        few = len(table) <= 12
        if name in self.hints and (not path or meant is None):
            remedy = self.hints[name]
        elif name in self.homes and self.homes[name] != path:
            remedy = f"It belongs in `{self.homes[name]}`."
        elif path and name in self.homes.values():
            remedy = "It belongs at the top."
        elif few:
            remedy = choose(name, table, "key")
        else:
            remedy = f"Did you mean `{meant}`?" if meant else "Leave it out."
        self.wrong(key, f"{where} no such key", remedy)


Act = Callable[[Work, str, Any], None]


@dataclass(frozen=True, slots=True)
class Key:
    """What a key takes, and what becomes of it."""

    kind: ValueKind
    act: Act
    if_open: str = ""
    """What `auto` means for it, where there is more to say than that it is left open."""
    knows_auto: bool = False
    """`auto` is a word of its own here, not a value left open."""


Table = Mapping[str, Key]

# The few ways in which a key is answered, to build tables of.


def to(
    path: str, kind: ValueKind, note: str = "", *, if_open: str = "", turned: Callable[[Any], Any] | None = None
) -> Key:
    """Honoured by a key of the run description, with the same value, or `turned` into its words."""

    def act(work: Work, key: str, value: Any) -> None:
        found = _plain(turned(value) if turned else value)
        work.put(path, found, key)
        work.honour(key, value, f"{path}: {show(found)}" + (f" ({note})" if note else ""))

    return Key(kind, act, if_open)


def unneeded(kind: ValueKind, why: str) -> Key:
    """Without meaning here; `why` says that nothing is lost."""
    return Key(kind, lambda work, key, value: work.leave(key, value, why))


def refused(kind: ValueKind, remedy: str) -> Key:
    """Not to be had."""
    return Key(kind, lambda work, key, value: work.refuse(key, value, remedy))


def only(neutral: Any, kind: ValueKind, why: str, remedy: str) -> Key:
    """Without meaning at its `neutral` value, or one of several; refused at any other."""
    neutrals = neutral if isinstance(neutral, tuple) else (neutral,)

    def act(work: Work, key: str, value: Any) -> None:
        folded = value.lower() if isinstance(value, str) else value
        if any(folded == each and isinstance(folded, bool) == isinstance(each, bool) for each in neutrals):
            work.leave(key, value, why)
        else:
            work.refuse(key, value, remedy)

    return Key(kind, act)


def off(remedy: str) -> Key:
    """A switch of something that is not there: off it says nothing, on it is refused."""
    return only(False, FLAG, "it is off, here as there", remedy)


def group(table: Table) -> Key:
    """A section, each key of which is answered by `table`."""
    return Key(SECTION, lambda work, key, value: work.walk(key, value, table))


def switched(table: Table, what: str, on: Act | None = None) -> Key:
    """A section with an `enabled`: while that is not true, its other keys say nothing."""

    def act(work: Work, key: str, value: Any) -> None:
        if value.get("enabled") is True:
            work.walk(key, value, table)
            if on is not None:
                on(work, key, value)
        else:
            work.walk(key, value, dormant(table, f"{what} off"))

    return Key(SECTION, act)


def dormant(table: Table, why: str) -> Table:
    """The same keys with nothing to say: values are still looked at."""
    return {name: replace(key, act=lambda w, k, v: w.leave(k, v, why)) for name, key in table.items()}


def gone(what: str, remedy: str, *keys: str) -> Key:
    """A whole section that is answered at once: it says nothing while off, and is refused otherwise.

    One that has an `enabled` names all its `keys`, so that a misspelt one is found; it is off without it.
    """

    def act(work: Work, key: str, value: Any) -> None:
        for name in value if keys and isinstance(value, Mapping) else ():
            if name not in ("enabled", *keys):
                work.wrong(f"{key}.{name}", f"`{key}` has no such key", choose(name, ("enabled", *keys), "key"))
        enabled = value.get("enabled", not keys) if isinstance(value, Mapping) else value
        if not enabled or enabled == "auto":
            work.leave(key, value, f"{what} off, here as there")
        else:
            work.refuse(key, value, remedy)

    return Key(either(SECTION, FLAG), act)


def _plain(value: Any) -> Any:
    """`2e8` as the whole number that it is; a tuple as a list."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1:
        return int(value)
    return list(value) if isinstance(value, tuple) else value
