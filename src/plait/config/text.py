"""How values and choices are put into words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_SHOWN = 60
"""Characters of a found value that a message repeats."""


def show(value: Any) -> str:
    """`value` as the user would have written it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def listed(values: Iterable[Any], joint: str = "and") -> str:
    """`a, b and c`."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} {joint} {last}" if most else last


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def whole_number(text: str) -> int | None:
    """What is written in at most 18 plain digits; None for any other text. Python reads no number of 5,000 digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def nearest(name: Any, choices: Iterable[Any]) -> str | None:
    """The choice that was probably meant, or None where none comes near."""
    from difflib import get_close_matches  # only ever needed for a message

    by_fold = {_fold(choice): str(choice) for choice in choices}
    folded = _fold(name)
    if not folded:
        return None
    close = get_close_matches(folded, by_fold, n=1, cutoff=0.65)
    inside = [choice for choice in by_fold if len(folded) >= 3 and folded in choice]
    match = folded if folded in by_fold else next(iter([*close, *inside]), None)
    return by_fold[match] if match is not None else None


def choose(name: Any, choices: Iterable[Any], noun: str) -> str:
    """A sentence that suggests the nearest choice, and one that names them all."""
    choices = list(choices)
    meant = nearest(name, choices)
    first = f"Did you mean `{meant}`? " if meant else ""
    plural = noun if noun.endswith("s") else f"{noun}s"
    return f"{first}The {plural} are {listed(choices)}."


def _fold(name: Any) -> str:
    return str(name).lower().replace("-", "").replace("_", "")
