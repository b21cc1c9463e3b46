"""Tool calls in the form of Hermes, which Qwen and others write: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A function that a model wants called."""

    name: str
    arguments: dict[str, Any]


def read_calls(text: str) -> list[ToolCall] | None:
    """The calls that a text consists of; None where it is anything else."""
    calls, rest = [], text.strip()
    while rest:
        inner, closed, after = rest.removeprefix(OPEN).partition(CLOSE)
        if not rest.startswith(OPEN) or not closed:
            return None
        try:
            said = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or said.keys() != {"name", "arguments"}:
            return None
        name, arguments = said["name"], said["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(name, arguments))
        rest = after.strip()
    return calls


class ToolReader:
    """Separates the content of an answer from the calls at its end, as the text comes."""

    def __init__(self) -> None:
        self._pending: list[str] = []
        """Text from where calls may have begun."""
        self._is_open = False

    def push(self, text: str) -> str:
        """Take more text; returns what is content for certain."""
        if self._is_open:
            self._pending.append(text)
            return ""
        whole = "".join([*self._pending, text])
        begin = whole.find(OPEN)
        self._is_open = begin >= 0
        if not self._is_open:  # its end may be the beginning of a call
            last = range(max(len(whole) - len(OPEN) + 1, 0), len(whole))
            begin = next((at for at in last if OPEN.startswith(whole[at:])), len(whole))
        self._pending = [whole[begin:]]
        return whole[:begin]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Content that is left, and the calls. What looks like a call and is none is content."""
        rest = "".join(self._pending)
        calls = read_calls(rest)
        return (rest, []) if calls is None else ("", calls)
