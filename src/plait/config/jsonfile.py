"""JSON that somebody else wrote: it is read as a whole, or refused with the name of its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.config.read import DEEPEST, depth_of
from plait.errors import PlaitError


def parse_json(text: str | bytes) -> Any:
    """The value in `text`. Raises `ValueError` for all that cannot be read or would not survive its readers.

    Python's own parser ends in a `RecursionError` where brackets are nested deeply, and takes halves of characters,
    which no file and no terminal can be given.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep") from None
    if depth_of(value) > DEEPEST:
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep")
    if ("\\u" if isinstance(text, str) else b"\\u") in text:  # type: ignore[operator]
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json_object(path: Path, error: Callable[[str], PlaitError], remedy: str = "copy it again") -> dict[str, Any]:
    """The JSON object in a file; anything else is an `error` that names the file."""
    try:
        found = parse_json(path.read_bytes())
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except ValueError as reason:
        raise error(f"{path} is not JSON ({reason}); {remedy}") from None
    if not isinstance(found, dict):
        raise error(f"{path} holds a {type(found).__name__}, expected a JSON object; {remedy}")
    return found
