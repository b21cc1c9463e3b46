"""Files that somebody else wrote: each is read as a whole, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from plait.config.encoding import as_utf8, half_character
from plait.config.read import DEEPEST, depth_of
from plait.errors import PlaitError


def parse_json(text: str | bytes, *, half_characters: bool = False) -> Any:
    """The value in `text`. Raises `ValueError` for all that cannot be read or would not survive its readers.

    Python's own parser ends in a `RecursionError` where brackets are nested deeply, it keeps the last of two values
    for one key and forgets the other, and it takes halves of characters, which no file and no terminal can be given;
    these are let through with `half_characters`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep") from None
    if depth_of(value) > DEEPEST:
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep")
    # Written as `\\u…` is the only way by which half of a character comes in.
    escaped = "\\u" in text if isinstance(text, str) else b"\\u" in text
    if not half_characters and escaped and (wrong := half_character(json.dumps(value, ensure_ascii=False))):
        raise ValueError(wrong)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return found


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


def read_lines(path: Path, error: Callable[[str], PlaitError]) -> list[str]:
    """The lines of a text file; what cannot be read, or is not UTF-8, is an `error` that names the file."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not UTF-8 text (byte {reason.start}): {as_utf8(reason.object)}") from None


def read_name(path: Path, error: Callable[[str], PlaitError]) -> str:
    """The name in a file such as `latest`: of something that lies beside it, or below."""
    name = "\n".join(read_lines(path, error)).strip()
    if not name or not name.isprintable() or not is_below(name):
        raise error(f"{path} holds {name[:80]!r}, expected the name of what lies beside it")
    return name


def is_below(name: str) -> bool:
    """Whether a relative path stays within the folder that it is relative to; links are not looked at."""
    parts = PurePath(name).parts
    short = len(name) <= 1000 and all(len(part.encode(errors="replace")) <= 255 for part in parts)
    return bool(parts) and short and "\0" not in name and not PurePath(name).is_absolute() and ".." not in parts


def weight_map(index: Path, error: Callable[[str], PlaitError]) -> dict[str, str]:
    """From `model.safetensors.index.json`: the names of tensors, and of the files beside it that hold them."""
    places = read_json_object(index, error).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise error(f"{index} has no `weight_map` from names to files; copy it again")
    if wrong := [file for file in places.values() if not is_below(file)]:
        raise error(f"{index} names the file {wrong[0]!r}, which is not in its folder; get the model elsewhere")
    return places
