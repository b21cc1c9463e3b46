"""Keys and what becomes of each: the form in which the strategies give their account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.config import choose
from plait.errors import ConfigError, Problem
from plait.frontends import Account, Answer

Row = Callable[["Sheet", str, Any], None]
"""Answers one key: is told the sheet, the key's path and its value."""


class Sheet:
    """Sections of a run description that fill up, with the account of where each came from."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.account = Account()

    def put(self, path: str, value: Any) -> None:
        """Set a dotted key of the run description."""
        *way, last = path.split(".")
        place = self.sections
        for key in way:
            place = place.setdefault(key, {})
        place[last] = value

    def walk(self, prefix: str, given: Mapping[str, Any], table: Mapping[str, Row]) -> None:
        """Answer every key; one that nobody knows is an error, with a suggestion."""
        unknown = [key for key in given if key not in table]
        if unknown:
            raise ConfigError(
                [Problem(f"{prefix}.{key}", "there is no such key", choose(key, table, "key")) for key in unknown]
            )
        for key, value in given.items():
            table[key](self, f"{prefix}.{key}", value)


def honoured(path: str, turned: Callable[[Any], Any] = lambda value: value) -> Row:
    """The same thing under a key of the run description."""

    def row(sheet: Sheet, key: str, value: Any) -> None:
        found = turned(value)
        sheet.put(path, found)
        sheet.account.add(Answer.HONOURED, key, value, f"{path}: {found}")

    return row


def noted(text: str) -> Row:
    """The runner itself does what it says."""
    return lambda sheet, key, value: sheet.account.add(Answer.HONOURED, key, value, text)


def unneeded(text: str) -> Row:
    """Without meaning here; the text says why that is safe."""
    return lambda sheet, key, value: sheet.account.add(Answer.UNNEEDED, key, value, text)


def refused(remedy: str, *neutral: Any) -> Row:
    """Not to be had, except at a value that asks for nothing."""

    def row(sheet: Sheet, key: str, value: Any) -> None:
        if value is None or any(value is each or value == each for each in neutral):
            sheet.account.add(Answer.UNNEEDED, key, value, "it asks for nothing")
        else:
            sheet.account.add(Answer.REFUSED, key, value, remedy)

    return row
