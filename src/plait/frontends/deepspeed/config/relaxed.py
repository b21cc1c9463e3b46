"""The part of Hjson that configurations make use of: DeepSpeed reads its files with it.

A line's end stands for a comma, a key needs no quotes, `#` starts a comment, and the outermost braces may be missing.
"""

from __future__ import annotations

import re
from typing import Any

from plait.config import jsonc

_KEY_FIRST = re.compile(r'\s*"(?:\\.|[^"\\\n])*"\s*:')
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|[{}\[\],:]|[^\s"/{}\[\],:#]+', re.DOTALL)


def load(text: str) -> Any:
    """The value that `text` holds. Raises `json.JSONDecodeError` where it is not even that."""
    pieces: list[str] = []
    before, gap, end = "", "", 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        gap += text[end : match.start()]
        end = match.end()
        if token.startswith(("//", "#", "/*")):
            gap += re.sub(r"[^\n]", " ", token)
            continue
        if _ends(before) and _begins(token) and "\n" in gap:
            gap = "," + gap
        if re.fullmatch(r"[A-Za-z_]\w*", token) and re.match(r"\s*:", text[end:]):
            token = f'"{token}"'
        pieces += (gap, token)
        before, gap = token, ""
    plain = "".join([*pieces, gap, text[end:]])
    return jsonc.load(f"{{{plain}}}" if _KEY_FIRST.match(plain) else plain)


def _ends(token: str) -> bool:
    """Whether a value, or a key, may end with this."""
    return token not in ("", "{", "[", ",", ":")


def _begins(token: str) -> bool:
    """Whether a value, or a key, may begin with this."""
    return token not in ("}", "]", ",", ":")
