"""A translation while it is put together: settings in Plait's words, and an answer for every key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from plait.config import choose, show
from plait.errors import ConfigError, Problem
from plait.frontends import Account, Answer, Translation

Reader = Callable[["Words", str, Any], None]
"""Answers one key: (words, the key's full name, its value)."""


class Words:
    """Collects settings by their dotted paths, and what became of each key."""

    def __init__(self) -> None:
        self.account = Account()
        self.problems: list[Problem] = []
        self._settings: dict[str, Any] = {}

    def set(self, path: str, value: Any) -> None:
        """Give a setting of Plait a value."""
        self._settings[path] = value

    def get(self, path: str) -> Any:
        """What a setting was given; None where it was not."""
        return self._settings.get(path)

    def drop(self, path: str) -> None:
        """Take a setting back."""
        self._settings.pop(path, None)

    def honoured(self, key: str, value: Any, text: str) -> None:
        """It does here what it does there."""
        self.account.add(Answer.HONOURED, key, value, text)

    def mapped(self, key: str, value: Any, text: str) -> None:
        """Something here does the same under another name."""
        self.account.add(Answer.MAPPED, key, value, text)

    def unneeded(self, key: str, value: Any, text: str) -> None:
        """It has no meaning here."""
        self.account.add(Answer.UNNEEDED, key, value, text)

    def refused(self, key: str, value: Any, text: str) -> None:
        """It cannot be had."""
        self.account.add(Answer.REFUSED, key, value, text)

    def wrong(self, key: str, message: str, remedy: str) -> None:
        """The key or its value is a mistake."""
        self.problems.append(Problem(key, message, remedy))

    def read(self, section: Mapping[str, Any], readers: Mapping[str, Reader], prefix: str = "") -> None:
        """Answer every key of a section; an unknown one is a problem, with a suggestion."""
        for name, value in section.items():
            reader = readers.get(name)
            if reader is None:
                self.wrong(f"{prefix}{name}", "Accelerate has no such key", choose(name, sorted(readers), "key"))
            else:
                reader(self, f"{prefix}{name}", value)

    def section(self, key: str, value: Any) -> Mapping[str, Any] | None:
        """The section that a value is; None, with the answer given, where there is nothing to read."""
        if not value:
            self.unneeded(key, value, "empty")
        elif isinstance(value, Mapping):
            return value
        else:
            self.wrong(key, f"{value!r} is no section", "Write its keys below it.")
        return None

    def translation(self) -> Translation:
        """The sections and the account; raises `ConfigError` with every mistake."""
        if self.problems:
            raise ConfigError(self.problems)
        sections: dict[str, Any] = {}
        for path, value in self._settings.items():
            *outer, name = path.split(".")
            node = sections
            for part in outer:
                node = node.setdefault(part, {})
            node[name] = value
        return Translation(sections, self.account)

    # ---- values as people write them

    def flag(self, key: str, value: Any) -> bool:
        """A switch: true and false, or the words that YAML and the command line have for them."""
        word = str(value).lower()
        if value is None or word in ("false", "no", "none", "0", ""):
            return False
        if word not in ("true", "yes", "1"):
            self.wrong(key, f"{show(value)} is neither true nor false", "Write true or false.")
        return True

    def count(self, key: str, value: Any, *, least: int = 1) -> int | None:
        """A whole number; None, with a problem, where it is none."""
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if isinstance(value, bool) or number < least:
            self.wrong(key, f"{show(value)} is no number from {least}", "Write a whole number.")
            return None
        return number

    def word(self, key: str, value: Any, choices: Iterable[str]) -> str | None:
        """One of `choices`, in any case; None, with a problem, where it is none of them."""
        choices = list(choices)
        found = next((choice for choice in choices if choice.lower() == str(value).lower()), None)
        if found is None:
            self.wrong(key, f"{show(value)} is not known", choose(value, choices, "word"))
        return found


def answered(kind: str, text: str) -> Reader:
    """A reader that gives the same answer to any value: `mapped`, `unneeded` or `refused`."""
    return lambda words, key, value: getattr(words, kind)(key, value, text)


def switched_off(refusal: str) -> Reader:
    """A reader for what Plait does not have: fine while it is off, refused otherwise."""

    def read(words: Words, key: str, value: Any) -> None:
        if value in (None, [], {}, "") or (not isinstance(value, (list, dict)) and _is_off(value)):
            words.unneeded(key, value, "off, as here")
        else:
            words.refused(key, value, refusal)

    return read


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "no", "none", "0")
