"""One translation under way: what was read, what became of it, what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plait.config import choose, nearest, show
from plait.errors import Problem
from plait.frontends import ABSENT, Account, Answer
from plait.frontends.deepspeed.config.kinds import Kind

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
    account: Account = field(default_factory=Account)
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
        self.account.add(Answer.HONOURED, key, value, text)

    def map(self, key: str, value: Any, text: str) -> None:
        """Something here does the same, or nearly."""
        self.account.add(Answer.MAPPED, key, value, text)

    def leave(self, key: str, value: Any, text: str) -> None:
        """The key has no meaning here, and `text` says why that is safe."""
        self.account.add(Answer.UNNEEDED, key, value, text)

    def refuse(self, key: str, value: Any, text: str) -> None:
        """The key cannot be had, and `text` says what to write instead."""
        self.account.add(Answer.REFUSED, key, value, text)

    def imply(self, key: str, text: str) -> None:
        """A key that is absent or left open means something all the same: a default that is not Plait's."""
        entries = self.account.entries
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

    kind: Kind
    act: Act
    if_open: str = ""
    """What `auto` means for it, where there is more to say than that it is left open."""
    knows_auto: bool = False
    """`auto` is a word of its own here, not a value left open."""


Table = Mapping[str, Key]
