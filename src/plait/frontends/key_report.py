"""The outcome of every key of another framework's configuration: honoured, mapped, unneeded or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.config import show
from plait.errors import ConfigError, Problem

_WIDEST = 56
"""Characters of a key with its value that lines are aligned to."""

ABSENT = "(absent)"
"""The value of a key that is not there, where what it means without being there has to be said."""


class KeyOutcome(StrEnum):
    """The four things that can happen to a key. There is no fifth: nothing is ignored."""

    HONOURED = "honoured"
    """It does here what it does there."""
    MAPPED = "mapped"
    """Something here does the same under another name, or nearly so; the text says what."""
    UNNEEDED = "unneeded"
    """It has no meaning in this engine; the text says why it is safe to leave out."""
    REFUSED = "refused"
    """It cannot be had; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key, its value, and its outcome."""

    key: str
    value: Any
    outcome: KeyOutcome
    text: str

    @property
    def shown(self) -> str:
        """The value as it was written, cut where it is long."""
        if isinstance(self.value, float) and self.value >= 1e6:
            return f"{self.value:g}"
        return ABSENT if self.value == ABSENT else show(self.value)


@dataclass(slots=True)
class KeyReport:
    """The outcomes of all keys of a configuration, in its own order."""

    entries: list[KeyEntry] = field(default_factory=list)

    def add(self, outcome: KeyOutcome, key: str, value: Any, text: str) -> None:
        """Record the outcome of a key."""
        self.entries.append(KeyEntry(key, value, outcome, text))

    def of(self, *outcomes: KeyOutcome) -> Iterable[KeyEntry]:
        """The entries with one of these outcomes."""
        return (entry for entry in self.entries if entry.outcome in outcomes)

    def summary(self) -> str:
        """How many keys have which outcome, in one line."""
        counts = Counter(entry.outcome for entry in self.entries)
        by_outcome = ", ".join(f"{counts[outcome]} {outcome}" for outcome in KeyOutcome if counts[outcome])
        total = len(self.entries)
        return f"{total} key{'' if total == 1 else 's'}" + (f": {by_outcome}" if by_outcome else "")

    def lines(self) -> list[str]:
        """One line per key: the outcome, the key with its value, and what it becomes."""
        keys = [f"{entry.key}: {entry.shown}" for entry in self.entries]
        width = min(max(map(len, keys), default=0), _WIDEST)
        return [
            f"{entry.outcome:<8}  {key:<{width}}  {entry.text}" for entry, key in zip(self.entries, keys, strict=True)
        ]

    def raise_refusals(self) -> None:
        """One error that names every refused key; none where nothing was refused."""
        problems = [Problem(entry.key, entry.shown, entry.text) for entry in self.of(KeyOutcome.REFUSED)]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class Translation:
    """The sections of a run description, and the report on the keys that they came from."""

    sections: dict[str, Any]
    report: KeyReport
