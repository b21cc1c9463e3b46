"""Reading and writing files that the user named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.config import as_utf8
from plait.errors import ConfigError, Problem


def write_file(path: str | Path, text: str, flag: str) -> None:
    """Write a text to a file. If that fails, raise a `ConfigError` that names the flag which gave the path."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(path, f"cannot be written: {error.strerror}", flag) from None


def read_file(path: str | Path, flag: str) -> str:
    """Return the text of a file. If that fails, raise a `ConfigError` that names the flag which gave the path."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}", flag) from None
    except UnicodeDecodeError as error:
        raise _refusal(path, f"is not UTF-8 text: {as_utf8(error.object)}", flag) from None


def _refusal(path: str | Path, reason: str, flag: str) -> ConfigError:
    return ConfigError(Problem(flag, f"{str(path)!r} {reason}", "Give another path."))


def import_from_here() -> None:
    """Add the current folder to `sys.path`, as `python -m` does, so that `target: my_module:MyModel` can be found."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
