"""How values and choices are put into words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LONGEST = 60
"""Characters of a found value that a message repeats."""


def show(value: Any) -> str:
    """`value` as the user would have written it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def listed(words: Iterable[Any], joint: str = "and") -> str:
    """`a, b and c`."""
    *most, last = [str(word) for word in words]
    return f"{', '.join(most)} {joint} {last}" if most else last


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def whole_number(text: str) -> int | None:
    """What is written in at most 18 plain digits; None for any other text. Python reads no number of 5,000 digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def nearest(word: Any, choices: Iterable[Any]) -> str | None:
    """The choice that was probably meant, or None where none comes near."""
    from difflib import get_close_matches  # only ever needed for a message

    by_fold = {_fold(choice): str(choice) for choice in choices}
    folded = _fold(word)
    if not folded:
        return None
    close = get_close_matches(folded, by_fold, n=1, cutoff=0.65)
    inside = [choice for choice in by_fold if len(folded) >= 3 and folded in choice]
    found = folded if folded in by_fold else next(iter([*close, *inside]), None)
    return by_fold[found] if found is not None else None


def choose(word: Any, choices: Iterable[Any], kind: str) -> str:
    """A sentence that suggests the nearest choice, and one that names them all."""
    choices = list(choices)
    meant = nearest(word, choices)
    first = f"Did you mean `{meant}`? " if meant else ""
    plural = kind if kind.endswith("s") else f"{kind}s"
    return f"{first}The {plural} are {listed(choices)}."


def _fold(word: Any) -> str:
    return str(word).lower().replace("-", "").replace("_", "")
