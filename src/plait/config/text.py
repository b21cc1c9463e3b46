"""Formats values and choices for messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_SHOWN = 60
"""Characters of a value that a message shows."""


def show(value: Any) -> str:
    """Return `value` as in a file, truncated where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python does not convert numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def listed(values: Iterable[Any], joint: str = "and") -> str:
    """Return `a, b and c`."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} {joint} {last}" if most else last


def counted(number: int, one: str, many: str = "") -> str:
    """Return `1 step` or `2 steps`; `many` where the plural is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def whole_number(text: str) -> int | None:
    """Return the number in a text of at most 18 ASCII digits; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def nearest(name: Any, choices: Iterable[Any]) -> str | None:
    """Return the choice that was probably meant; None where none is similar."""
    from difflib import get_close_matches  # imported here, as only messages need it

    by_fold = {_fold(choice): str(choice) for choice in choices}
    folded = _fold(name)
    if not folded:
        return None
    close = get_close_matches(folded, by_fold, n=1, cutoff=0.65)
    inside = [choice for choice in by_fold if len(folded) >= 3 and folded in choice]
    match = folded if folded in by_fold else next(iter([*close, *inside]), None)
    return by_fold[match] if match is not None else None


def choose(name: Any, choices: Iterable[Any], noun: str) -> str:
    """Return a sentence that suggests the nearest choice, and one with all choices."""
    choices = list(choices)
    meant = nearest(name, choices)
    first = f"Did you mean `{meant}`? " if meant else ""
    plural = noun if noun.endswith("s") else f"{noun}s"
    return f"{first}The {plural} are {listed(choices)}."


def _fold(name: Any) -> str:
    return str(name).lower().replace("-", "").replace("_", "")
