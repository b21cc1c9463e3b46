"""Text from elsewhere on its way to a log or a terminal."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with every control character escaped (`\x1b`), so that it can neither fake a line nor steer a terminal.

    Characters that turn the direction of writing or join lines are among them. `keep` names exceptions.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )
