"""A DeepSpeed configuration as people hand it over: a file, a mapping, or base64."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config import ENDINGS, read, show, text_of
from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.config import relaxed


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values, unchecked. A file may have comments; a text that names none is taken for base64."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str) and not _is_path(config):
        return _mapping("config", _decoded(config))
    path = Path(config)
    if path.is_file() and path.suffix.lower() not in ENDINGS:
        return _mapping(str(path), _loaded(str(path), text_of(path)))
    try:
        return read(path)
    except ConfigError:
        if not path.is_file():
            raise
        try:
            return _mapping(str(path), relaxed.load(path.read_text(encoding="utf-8-sig")))
        except ValueError:
            pass  # the first message shows the place
        raise


def _is_path(text: str) -> bool:
    """A file that is there, or a name that reads like one."""
    if Path(text).suffix.lower() in ENDINGS:
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False  # far too long for a name


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
        return relaxed.load(text)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError(Problem(where, error.msg[0].lower() + error.msg[1:], "Write JSON.")) from None


def _mapping(name: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(Problem(name, f"expected keys and values, found {show(data)}", "Write a JSON object."))
    return data
