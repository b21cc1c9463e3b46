"""Prints an error once, even if many ranks raise it.

A rank that Plait's launcher started leaves its message in a folder, and the launcher prints it when all ranks have
ended. A rank that another launcher started prints its message itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from plait.config import whole_number
from plait.errors import ConfigError, PlaitError
from plait.launch.heartbeat import FOLDER_VARIABLE

_PREFIX = "plait-ranks-"
_YOUNG_S = 60.0
"""The age up to which a folder is not removed: its launcher may not have locked it yet."""


def report_failure(error: PlaitError) -> None:
    """Write the message of an error to the launcher's folder, or print it if there is none."""
    rank = whole_number(os.environ.get("RANK", "")) or 0
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None and Path(folder).is_dir():
        with suppress(OSError):  # such as a full disk, which may be the error itself: print it here
            Path(folder, str(rank)).write_text(str(error), encoding="utf-8")
            return
    if rank != 0:
        if isinstance(error, ConfigError):
            return  # all ranks raise the same error for a wrong setting, and rank 0 prints it
        # Rank 0 most likely has the same error, and prints it first. If it has not, this rank's message is printed.
        time.sleep(1.0)
    print(f"plait: {error}" if rank == 0 else f"plait: rank {rank}: {error}", file=sys.stderr, flush=True)


def _remove_abandoned(root: Path) -> None:
    """Remove the folders of launchers that were killed: a running launcher holds a lock on its folder."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's folder, or removed in the meantime
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                if _take_lock(lock):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _take_lock(lock: int) -> bool:
    """Try to lock a folder; return whether that succeeded. On a file system without locks, return False."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class RankMessages:
    """The folder in which ranks leave messages, heartbeats and stacks. It exists while this context is open."""

    def __enter__(self) -> RankMessages:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self._lock = os.open(self._folder.name, os.O_RDONLY)
        _take_lock(self._lock)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()
        os.close(self._lock)

    @property
    def folder(self) -> Path:
        """The folder's path."""
        return Path(self._folder.name)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that ranks need. They enable torch's flight recorder, for the collectives in heartbeats."""
        return {
            FOLDER_VARIABLE: self._folder.name,
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "16"),
        }

    def raw(self) -> dict[int, str]:
        """Return the message that each rank left, by rank."""
        files = (path for path in Path(self._folder.name).iterdir() if path.name.isdecimal())
        paths = sorted(files, key=lambda path: int(path.name))
        return {int(path.name): path.read_text(encoding="utf-8", errors="replace") for path in paths}


def merge_messages(messages: Mapping[int, str]) -> list[str]:
    """Return each message once; if not all are equal, with the ranks that left it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(messages.items()):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return list(ranks)
    return [f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
