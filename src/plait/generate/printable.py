"""Text from elsewhere on its way to a log or a terminal."""

from __future__ import annotations

import re

_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, among them those that begin an escape sequence
    "\u2028\u2029"  # ends of lines
    "\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\ud800-\udfff]"  # halves of characters, which no file takes
)


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with what could fake a line or steer a terminal escaped (`\x1b`); `keep` names exceptions."""
    return _STEERING.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
