"""Reads a DeepSpeed configuration in each of its forms: a file, a mapping, or base64."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config import SUFFIXES, load_jsonc, read, show, text_of
from plait.errors import ConfigError, Problem

# DeepSpeed reads its files as Hjson. This reads the part of Hjson that configurations use: the end of a line may
# replace a comma, a key needs no quotes, `#` starts a comment, and the outermost braces may be missing.


_KEY_FIRST = re.compile(r'\s*"(?:\\.|[^"\\\n])*"\s*:')
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/|[{}\[\],:]|[^\s"/{}\[\],:#]+', re.DOTALL)


def load(text: str) -> Any:
    """Return the value of a JSON or Hjson text; raise `json.JSONDecodeError` if it is neither."""
    pieces: list[str] = []
    before, gap, end = "", "", 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        gap += text[end : match.start()]
        end = match.end()
        if token.startswith(("//", "#", "/*")):
            gap += re.sub(r"[^\n]", " ", token)
            continue
        if _is_end(before) and _is_start(token) and "\n" in gap:
            gap = "," + gap
        if re.fullmatch(r"[A-Za-z_]\w*", token) and re.match(r"\s*:", text[end:]):
            token = f'"{token}"'
        pieces += (gap, token)
        before, gap = token, ""
    plain = "".join([*pieces, gap, text[end:]])
    return load_jsonc(f"{{{plain}}}" if _KEY_FIRST.match(plain) else plain)


def _is_end(token: str) -> bool:
    """Whether a value or key may end with this token."""
    return token not in ("", "{", "[", ",", ":")


def _is_start(token: str) -> bool:
    """Whether a value or key may begin with this token."""
    return token not in ("}", "]", ",", ":")


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values, unchecked. `config` is a mapping, a file, or a text in base64."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str) and not _is_path(config):
        return _mapping("config", _decoded(config))
    path = Path(config)
    if path.is_file() and path.suffix.lower() not in SUFFIXES:
        return _mapping(str(path), _loaded(str(path), text_of(path)))
    try:
        return read(path)
    except ConfigError:
        if not path.is_file():
            raise
        try:
            return _mapping(str(path), load(path.read_text(encoding="utf-8-sig")))
        except ValueError:
            pass  # the first error has the line number
        raise


def _is_path(text: str) -> bool:
    """Whether a text names an existing file, or has the suffix of a configuration file."""
    if Path(text).suffix.lower() in SUFFIXES:
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False  # too long for the name of a file


def _decoded(text: str) -> Any:
    message = f"{show(text)} is neither a file nor a configuration in base64"
    remedy = "Give the path of a JSON file, a mapping, or the base64 of one in JSON."
    try:
        plain = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        raise ConfigError(Problem("config", message, remedy)) from None
    return _loaded("config", plain)


def _loaded(name: str, text: str) -> Any:
    try:
        return load(text)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError(Problem(where, error.msg[0].lower() + error.msg[1:], "Write JSON.")) from None


def _mapping(name: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(Problem(name, f"expected keys and values, found {show(data)}", "Write a JSON object."))
    return data
