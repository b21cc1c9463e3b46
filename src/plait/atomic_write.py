"""Atomic writes: files and folders are written beside their target, and moved there once they are complete.

[Note: leftovers of killed processes] A killed process cannot clean up, and its temporary files would stay for ever. So
they lie in a hidden folder on which the writer holds a lock, and every writer in the same parent folder first removes
the hidden folders that are not locked. A lock ends with its process, however that ends. A process id would not do: it
is reused, and means nothing on another host. On file systems without locks nothing is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STAGING = re.compile(r"\..+\.[0-9a-f]{32}\.tmp$")


@contextmanager
def staging_path(target: Path) -> Iterator[Path]:
    """Yield a path on the file system of `target`, for a file or folder to be moved there; the end removes leftovers.

    Any number of processes may write the same target: each has its own path. [Note: leftovers of killed processes]
    """
    if target.parent.is_dir():
        _sweep(target.parent)
    folder, lock = _make(target)
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def write_atomically(target: Path, text: str) -> None:
    """Write a file: after a crash, or if the disk is full, it has either its old or its new contents."""
    with staging_path(target) as staging:
        with staging.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(target)


def _make(target: Path) -> tuple[Path, int | None]:
    """Create a hidden folder, and lock it; None if the file system has no locks."""
    while True:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        folder.mkdir(parents=True)
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process removed it before it was locked
        except OSError:
            return folder, None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def _sweep(parent: Path) -> None:
    for folder in parent.iterdir():
        if _STAGING.match(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # its writer is active, or another process removes it
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
