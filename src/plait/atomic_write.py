"""What is written beside its place, and moved there once it is whole.

[Note: drafts of the dead] A process that is killed cannot tidy up, and what it leaves under a name of its own would
stay for ever: with every kill one more. So a draft lies in a hidden folder on which its writer holds a lock, and
whoever drafts something in the same place removes the folders that nobody holds any more. A lock ends with its process,
however that ends. The number of a process would not do: it is used again, and means nothing on another host. Where the
file system has no locks, nothing is removed.
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

_DRAFT = re.compile(r"\..+\.[0-9a-f]{32}\.tmp$")


@contextmanager
def drafting(target: Path) -> Iterator[Path]:
    """A path on the disk of `target` for a file or folder that is to be moved there; the end removes what is left.

    Any number of processes may draft the same thing: each has a path to itself. [Note: drafts of the dead]
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
    """Write a file: after a crash, or where the disk is full, it is there as it was, or as it is now."""
    with drafting(target) as draft:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)


def _make(target: Path) -> tuple[Path, int | None]:
    """A new folder, and the lock on it."""
    while True:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        folder.mkdir(parents=True)
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # somebody who tidies up was faster
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


def _sweep(place: Path) -> None:
    for folder in place.iterdir():
        if _DRAFT.match(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # its writer is at work, or somebody else tidies up
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
