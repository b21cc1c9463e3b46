"""Converting an open source to a target path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from plait.atomic_write import staging_path
from plait.checkpoint.convert.huggingface import Description
from plait.checkpoint.convert.source import Source, only
from plait.checkpoint.save import sync_to_disk, write_single_process
from plait.errors import CheckpointError, ConfigError, Problem
from plait.monitor import format_bytes
from plait.plugins import call, find

Format = Literal["hf", "torch", "plait", "deepspeed"]
FORMATS: tuple[Format, ...] = ("hf", "torch", "plait", "deepspeed")
"""The formats that can be written."""

WRITERS: Mapping[str, str] = MappingProxyType(
    {
        "hf": "plait.checkpoint.convert.huggingface:write_huggingface",
        "torch": "plait.checkpoint.convert.torchfile:write_torch",
        "plait": "plait.checkpoint.convert.conversion:write_plait",
        "deepspeed": "plait.checkpoint.convert.deepspeed:write_deepspeed",
    }
)
"""The writer of each format as `module:name`, loaded like a user's; each returns the number of bytes it wrote."""

_KEY = "--to"

SHARD_SIZE = 5 * 10**9
"""Bytes of one file of a Hugging Face folder, by default."""


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote."""

    tensors: int
    bytes: int


class Writer(Protocol):
    """A user-provided writer for `plait convert --to`: a function that writes another format."""

    def __call__(self, source: Source, target: Path, /) -> None:
        """Write the source to a file or folder at `target`, a temporary path; the caller renames it afterwards."""


def _write_with(writer: str, source: Source, staging: Path) -> int:
    call(find("converter", writer, _KEY), _KEY, source, staging, name=writer, arguments={})
    if staging.is_file():
        return staging.stat().st_size
    files = [path for path in staging.rglob("*") if path.is_file()]
    if not files:
        raise ConfigError(Problem(_KEY, f"{writer!r} wrote nothing", "Write to the path that it gets."))
    return sum(path.stat().st_size for path in files)


def write_plait(source: Source, target: Path) -> int:
    """Write a Plait checkpoint and return its size in bytes."""
    return write_single_process(target, source.entries, source.read, source.state, step=steps(source))


def select_for(source: Source, to: Format | str, *, optimizer: bool) -> Source:
    """Return the part of a source that is written in format `to`; only for `torch` does that depend on `optimizer`."""
    if not any(name.startswith("model.") for name in source.entries):
        raise CheckpointError(f"{source.path} holds no weights: there is nothing to convert")
    if to == "hf":
        return only(source, "model")
    if to == "torch":
        return only(source, "model", *(["optim"] if optimizer else []))
    return only(source, "model", "optim") if to == "deepspeed" else source


def convert(
    source: Source,
    target: Path,
    to: Format | str,
    *,
    description: Description | None = None,
    shard_size: int = SHARD_SIZE,
    optimizer: bool = False,
    overwrite: bool = False,
) -> ConversionResult:
    """Write all of a source (see `select_for`) in another format, one tensor after another. Return what was written.

    If it fails, the target is as before. `to` may name a user-provided `Writer`. Only `hf` needs a `description`.
    """
    assert to != "hf" or description is not None
    needed = sum(entry.bytes for entry in source.entries.values())
    with replacing(target, source=source.path, needed=needed, overwrite=overwrite) as staging:
        if to in WRITERS:
            options: dict[str, dict[str, Any]] = {
                "hf": {"description": description, "shard_size": shard_size},
                "torch": {"optimizer": optimizer},
            }
            size: int = find("converter", WRITERS[to], _KEY)(source, staging, **options.get(to, {}))
        else:
            size = _write_with(to, source, staging)
    return ConversionResult(len(source.entries), size)


def steps(source: Source) -> int:
    """Return the number of optimizer steps of a checkpoint; 0 if it is not stored."""
    return int((source.state.get("engine") or {}).get("steps") or 0)


# Writing a target so that it is either complete or absent.


@contextmanager
def replacing(target: Path, *, source: Path, needed: int, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden path beside `target` for a file or folder, which is renamed to `target` when the block succeeds.

    An existing target is refused unless it may be overwritten, and so is a disk without `needed` free bytes. After a
    failure nothing is left, and an existing target is unchanged.
    """
    target = Path(os.path.abspath(target))
    try:
        _put_back(target)
        _refuse(target, source, overwrite=overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise CheckpointError(
                f"{target} needs {format_bytes(needed)}, and {target.parent} has {format_bytes(free)} free"
            )
        with staging_path(target) as staging:
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
            raise CheckpointError(f"{target} is a folder that is not a checkpoint; choose another name")


def _publish(staging: Path, target: Path) -> None:
    if target.is_dir() or (target.exists() and staging.is_dir()):
        # Only a file can be replaced atomically.
        os.replace(target, _backup_path(target))
        try:
            os.replace(staging, target)
        finally:
            _put_back(target)
    else:
        os.replace(staging, target)
    sync_to_disk(target.parent)


def _backup_path(target: Path) -> Path:
    """Return the name of the old target until the new one is in place."""
    return target.with_name(f".{target.name}.replaced")


def _put_back(target: Path) -> None:
    """Restore the old target if the new one is missing, else remove it."""
    backup = _backup_path(target)
    if not backup.exists():
        return
    if target.exists():
        _remove(backup)
    else:
        os.replace(backup, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(path: Path) -> None:
    for entry in [*path.rglob("*"), path]:
        if not entry.is_symlink():
            sync_to_disk(entry)
