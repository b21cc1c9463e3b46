"""Copies of checkpoints outside the `work_dir`: in a folder, an object store, anything that holds files.

[Note: local first]
A checkpoint is first written to the `work_dir`, as without a storage, and then copied. So there is one format and one
code path for saving and loading; training does not wait for the storage (with `checkpoint.async_save`); and features
that object stores lack (renaming, syncing, writing at an offset) are not needed. The manifest is copied last and
deleted first: in a storage too, a folder with a manifest is a complete checkpoint, and one without it is ignored.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, runtime_checkable

from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.manifest import MANIFEST_NAME, is_complete, read_manifest, saved_at
from plait.config import FolderStorageConfig, StorageConfig
from plait.errors import CheckpointError, ConfigError, PlaitError, Problem
from plait.plugins import build

T = TypeVar("T")
_KEY = "checkpoint.storage"
_MANIFEST = re.compile(rf"(step-\d+)/{re.escape(MANIFEST_NAME)}$")


@runtime_checkable
class Storage(Protocol):
    """The interface of a `checkpoint.storage`. File names are relative, with slashes: `step-00000010/index.json`.

    An object serves one run. Every rank constructs one, but only the first rank of each file system calls its methods.
    They may raise any exception.
    A storage that renames folders atomically has `atomic_rename = True` and a method `rename(old, new)`.
    """

    def write(self, name: str, source: Path) -> None:
        """Copy a local file to the storage, replacing one of that name; returns once the file is complete."""

    def read(self, name: str, target: Path) -> None:
        """Copy a file from the storage to a local one."""

    def names(self, prefix: str) -> Iterable[str]:
        """Return the names of all files that begin with `prefix`."""

    def delete(self, name: str) -> None:
        """Remove a file."""


class FolderStorage:
    """Keeps copies in another folder, perhaps on another disk."""

    atomic_rename = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, source: Path) -> None:
        """Copy a file and sync it to the disk."""
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())

    def read(self, name: str, target: Path) -> None:
        """Copy a file from the folder."""
        shutil.copyfile(self._root / name, target)

    def names(self, prefix: str) -> list[str]:
        """Return every file whose name begins with `prefix`."""
        files = (path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file())
        return [name for name in files if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        """Remove a file, and its folder when it is empty."""
        path = self._root / name
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()

    def rename(self, old: str, new: str) -> None:
        """Rename a folder."""
        os.replace(self._root / old, self._root / new)


def folder_storage(config: FolderStorageConfig) -> FolderStorage:
    """Return the storage for a `checkpoint.storage` section of type `folder`."""
    return FolderStorage(Path(config.path))


def build_storage(config: StorageConfig | None, folder: CheckpointFolder) -> StoredCheckpoints | None:
    """Return the storage of `checkpoint.storage`, for the checkpoints of `folder`; None without that section."""
    if config is None:
        return None
    storage = build(config, _KEY, accepts=Storage)
    missing = [
        method for method in ("write", "read", "names", "delete") if not callable(getattr(storage, method, None))
    ]
    if getattr(storage, "atomic_rename", False) and not callable(getattr(storage, "rename", None)):
        missing.append("rename")
    if missing:
        message = f"a {type(storage).__name__} has no method {missing[0]!r}"
        raise ConfigError(Problem(f"{_KEY}.type", message, "Give it the methods of `plait.checkpoint.Storage`."))
    return StoredCheckpoints(storage, folder, str(config.type))


class StoredCheckpoints:
    """The checkpoints of one run in a storage; see [Note: local first]."""

    def __init__(self, storage: Any, folder: CheckpointFolder, name: str) -> None:
        self._storage = storage
        self._folder = folder
        self._name = name
        self._renames = bool(getattr(storage, "atomic_rename", False))

    # ---- writing, in this order: one rank calls `clear`, the first rank of each file system `put`, one rank `seal`

    def clear(self, target: Path) -> None:
        """Remove the files of an earlier checkpoint of this name, and of an interrupted copy."""
        self._remove(self._write_folder(target))
        if not self._renames:
            self._remove(target.name)

    def put(self, target: Path) -> None:
        """Copy the files that this rank's file system has, except the manifest."""
        for path in sorted(target.iterdir()):
            if path.name != MANIFEST_NAME:
                self._storage.write(f"{self._write_folder(target)}/{path.name}", path)

    def seal(self, target: Path) -> None:
        """Copy the manifest, which makes the copy complete. Raise `CheckpointError` if any other file is missing."""
        folder = self._write_folder(target)
        there = set(self._storage.names(f"{folder}/"))
        lacking = [name for name in read_manifest(target).files if f"{folder}/{name}" not in there]
        if lacking:
            raise CheckpointError(f"{self._name} does not have {lacking[0]!r}, which was written to it")
        self._storage.write(f"{folder}/{MANIFEST_NAME}", target / MANIFEST_NAME)
        if self._renames:
            self._remove(target.name)
            self._storage.rename(folder, target.name)

    def prune(self, keep: int, keep_every: int | None, best: str | None) -> None:
        """Keep what `CheckpointFolder.prune` would, and remove incomplete copies."""
        complete = self._complete()
        newest = sorted(complete, key=lambda name: (complete[name], name))[-keep:]
        for name in {file.partition("/")[0] for file in self._storage.names(".step-")}:
            self._remove(name)
        for name in {file.partition("/")[0] for file in self._storage.names("step-")}:
            milestone = keep_every is not None and int(name.removeprefix("step-")) % keep_every == 0
            if name not in complete or not (name in newest or name == best or milestone):
                self._remove(name)

    def _write_folder(self, target: Path) -> str:
        return f".{target.name}.tmp" if self._renames else target.name

    def _remove(self, name: str) -> None:
        files = sorted(self._storage.names(f"{name}/"), key=lambda file: not file.endswith(f"/{MANIFEST_NAME}"))
        for file in files:
            self._storage.delete(file)

    def _complete(self) -> dict[str, float]:
        """Return by name when each complete checkpoint in the storage was saved."""
        saved_times = {}
        with TemporaryDirectory() as folder:
            for file in list(self._storage.names("step-")):
                if (match := _MANIFEST.match(file)) is not None:
                    self._storage.read(file, Path(folder) / MANIFEST_NAME)
                    saved_times[match[1]] = saved_at(Path(folder))
        return saved_times

    # ---- reading, on the first rank of each file system

    def newest(self) -> str | None:
        """Return the name of the checkpoint that was saved last; None if the storage has none."""
        return _newest(self._translate_errors(self._complete))

    def fetch(self, wanted: str) -> str:
        """Copy the checkpoint that `checkpoint.resume` names to the folder of the run, if only the storage has it.

        Return its path there, or `wanted` itself if that is an existing path or the storage does not have it. For
        `auto`, copy the newest checkpoint of the storage if the folder has none as new, and return `auto`.
        """
        complete = self._translate_errors(self._complete)
        if wanted == "auto":
            newest_here = self._folder.newest()
            newest = _newest(complete)
            if newest is not None and (newest_here is None or saved_at(newest_here) < complete[newest]):
                self._translate_errors(lambda: self._fetch(newest))
            return wanted
        if Path(wanted).exists() or wanted not in complete:
            return wanted
        if not is_complete(self._folder.root / wanted):
            self._translate_errors(lambda: self._fetch(wanted))
        return str(self._folder.root / wanted)

    def _fetch(self, name: str) -> None:
        target = self._folder.root / name
        unfinished = target.with_name(f".fetched-{name}")  # `sweep` removes it if this is interrupted
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._storage.read(f"{name}/{MANIFEST_NAME}", unfinished / MANIFEST_NAME)
        for file in read_manifest(unfinished).files:
            self._storage.read(f"{name}/{file}", unfinished / file)
        os.replace(unfinished, target)

    def _translate_errors(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except PlaitError:
            raise
        except Exception as error:  # a user's storage may raise anything
            raise CheckpointError(
                f"{_KEY} {self._name!r} cannot be read ({type(error).__name__}: {error}); repair or remove it"
            ) from error


def _newest(complete: Mapping[str, float]) -> str | None:
    return max(complete, key=lambda name: (complete[name], name), default=None)
