"""Files that a command was asked to read or to write."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.config import as_utf8
from plait.errors import ConfigError, Problem


def write_file(path: str | Path, text: str, flag: str) -> None:
    """Write a text. Raises `ConfigError` with the flag that named the path, where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(path, f"cannot be written: {error.strerror}", flag) from None


def read_file(path: str | Path, flag: str) -> str:
    """Return the text of a file. Raises `ConfigError` with the flag that named it, where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}", flag) from None
    except UnicodeDecodeError as error:
        raise _refusal(path, f"is not UTF-8 text: {as_utf8(error.object)}", flag) from None


def _refusal(path: str | Path, reason: str, flag: str) -> ConfigError:
    return ConfigError(Problem(flag, f"{str(path)!r} {reason}", "Give another path."))


def import_from_here() -> None:
    """Let `target: my_module:MyModel` find modules in the current folder, as `python -m` does."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
