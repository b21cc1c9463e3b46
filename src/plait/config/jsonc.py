"""JSON with comments and trailing commas, every key once. Imported only where JSON is read."""

from __future__ import annotations

import json
import re
from typing import Any

from plait.config.read import DEEPEST

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|[{}\[\],:]|[^\s"/{}\[\],:]+', re.DOTALL)


def load(text: str) -> Any:
    """The value that `text` holds. Raises `json.JSONDecodeError`, with the position in `text`."""
    plain = _plain(text)
    try:
        return json.loads(plain)
    except json.JSONDecodeError:
        raise
    except ValueError:  # of Python's own int()
        raise json.JSONDecodeError("a number has thousands of digits", text, 0) from None


def _plain(text: str) -> str:
    """`text` as standard JSON: what JSON lacks is blanked out, so every position stays what it was."""
    pieces = list(text)
    keys: list[set[str] | None] = []  # one entry an open bracket; None for a list
    before, position = "", 0
    comma: int | None = None
    for match in _TOKEN.finditer(text):
        token, start = match.group(), match.start()
        if token.startswith("/"):
            pieces[start : match.end()] = re.sub(r"[^\n]", " ", token)
            continue
        if token in "}]" and comma is not None:
            pieces[comma] = " "
        comma = start if token == "," and before not in "{[,:" else None
        if token == ":" and before.startswith('"') and keys and keys[-1] is not None:
            if before in keys[-1]:
                raise json.JSONDecodeError(f"the key {before} stands here a second time", text, position)
            keys[-1].add(before)
        if token in "{[":
            if len(keys) >= DEEPEST:
                raise json.JSONDecodeError(f"more than {DEEPEST} brackets are open here", text, start)
            keys.append(set() if token == "{" else None)
        elif token in "}]" and keys:
            keys.pop()
        before, position = token, start
    return "".join(pieces)
