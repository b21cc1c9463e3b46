"""Where a conversion writes to: all of it under its name, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.atomic_write import drafting
from plait.errors import CheckpointError


@contextmanager
def replacing(target: Path, *, source: Path, needed: int, overwrite: bool) -> Iterator[Path]:
    """A hidden path beside `target` to write a file or a folder to; it gets its name when the block ends well.

    Before: an existing target is refused, unless it may be overwritten, and so is a disk without `needed` bytes.
    After a failure nothing is left, and what was there is as it was.
    """
    target = Path(os.path.abspath(target))
    try:
        _put_back(target)
        _refuse(target, source, overwrite=overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise CheckpointError(f"{target} needs {_gib(needed)}, and {target.parent} has {_gib(free)} free")
        with drafting(target) as staging:
            yield staging
            _sync_all(staging)
            _publish(staging, target)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error}") from error


def _refuse(target: Path, source: Path, *, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; choose another name, or give --overwrite to replace it")
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link; name what it points at to replace that")
    if not (target.is_file() or target.is_dir()):
        raise CheckpointError(f"{target} is neither a file nor a folder; choose another name")
    inside = source.resolve()
    if target.resolve() in inside.parents:
        raise CheckpointError(f"{target} holds {source}, which is to be converted; choose another name")
    if target.is_dir() and any(target.iterdir()):
        from plait.checkpoint.convert.detect import kind_of

        if kind_of(target) is None:
            raise CheckpointError(f"{target} is a folder of other things than a checkpoint; choose another name")


def _publish(staging: Path, target: Path) -> None:
    if target.is_dir() or (target.exists() and staging.is_dir()):
        # Only a file can take the place of another thing in one step.
        os.replace(target, _aside(target))
        try:
            os.replace(staging, target)
        finally:
            _put_back(target)
    else:
        os.replace(staging, target)
    _sync(target.parent)


def _aside(target: Path) -> Path:
    """Where the old one waits until the new one has its name."""
    return target.with_name(f".{target.name}.replaced")


def _put_back(target: Path) -> None:
    """Where the old one still waits, the new one did not come, or there was no time to remove the old one."""
    aside = _aside(target)
    if not aside.exists():
        return
    if target.exists():
        _remove(aside)
    else:
        os.replace(aside, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(path: Path) -> None:
    for each in [*path.rglob("*"), path]:
        if not each.is_symlink():
            _sync(each)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
