"""Folders that are made once and then only read, by any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.errors import DataError
from plait.ops import drafting


def cache_root(setting: str | None) -> Path:
    """The folder that was asked for, or `plait` in the user's cache folder."""
    return Path(setting).expanduser() if setting is not None else Path.home() / ".cache" / "plait"


def cached(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `root/name`, filled by `build` if it does not exist yet.

    It appears complete or not at all. Processes that build it at the same time do not disturb each other:
    the first to finish wins, and since a name stands for its content, the others lose nothing. Raises `DataError`
    where nothing can be written there.
    """
    entry = root / name
    try:
        if entry.is_dir():
            return entry
        with drafting(entry) as draft:
            draft.mkdir()
            build(draft)
            draft.rename(entry)
    except OSError as error:
        if isinstance(error, PermissionError) or not entry.is_dir():
            reason = error.strerror or str(error)
            raise DataError(
                f"tokens cannot be kept in {root}: {reason}; name another folder as `data.cache`"
            ) from error
    return entry
