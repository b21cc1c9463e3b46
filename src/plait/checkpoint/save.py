"""Write a checkpoint so that a kill at any moment leaves the last good one usable."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from plait.checkpoint.manifest import FileRecord, Manifest, checksum
from plait.checkpoint.quiet import quiet_single_process
from plait.errors import CheckpointError
from plait.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def save_checkpoint(
    target: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, step: int, world: World
) -> int:
    """Write all ranks' tensors to `target`; returns its size in bytes.

    Everything goes to a hidden folder beside it, reaches the disk, gets its manifest, and only then its name.
    Every rank must call it; if one fails, all raise, and what was there before is untouched.
    """
    staging = target.with_name(f".{target.name}.tmp")
    try:
        _agree(world, _try(lambda: _make_staging(staging)) if world.is_main else None)
        metadata = _write(staging, tensors, world)
        written: dict[str, FileRecord] = {}
        _agree(world, _try(lambda: written.update(_records(staging, world))))
        files = {name: record for part in world.gather(written) for name, record in part.items()}
        failure = None
        if world.is_main:
            manifest = _manifest(metadata, files, state, step=step, world=world)
            failure = _try(lambda: _complete(staging, target, manifest))
        _agree(world, failure)
    except CheckpointError:
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)  # on a full disk it would stand in the way of the next one
        raise
    return sum(record.bytes for record in files.values())


def _write(staging: Path, tensors: Mapping[str, Tensor], world: World) -> Metadata:
    """Write this rank's part; returns what all ranks wrote together."""
    # Late: [Note: DTensor is loaded late]
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    failure = metadata = None
    try:
        with quiet_single_process():
            writer = FileSystemWriter(staging, sync_files=True, overwrite=True)
            metadata = save(dict(tensors), storage_writer=writer, no_dist=world.size == 1)
    except (Exception, CheckpointException) as error:  # DCP's own is a BaseException, raised on every rank
        failure = _reason(error) + _shortage(staging, tensors)
    _agree(world, failure)
    assert metadata is not None
    return cast("Metadata", metadata)


def _make_staging(staging: Path) -> None:
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)


def _records(staging: Path, world: World) -> dict[str, FileRecord]:
    mine = f"__{world.rank}_"
    return {
        p.name: checksum(p)
        for p in staging.iterdir()
        if p.name.startswith(mine) or (world.is_main and p.name == ".metadata")
    }


def _manifest(
    metadata: Metadata, files: dict[str, FileRecord], state: Mapping[str, Any], *, step: int, world: World
) -> Manifest:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return Manifest(
        step=step,
        saved_at=time.time(),
        world_size=world.size,
        files=files,
        # Ranks have tensors of their own (their random state), so the union is asked for, not this rank's part.
        tensors={
            name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        },
        state=dict(state),
        versions={"plait": version("plait"), "torch": torch.__version__},
    )


def _complete(staging: Path, target: Path, manifest: Manifest) -> None:
    manifest.write(staging)
    _sync(staging)
    if target.exists():
        # The same step, saved again: the old one steps aside until the new one has its name.
        aside = target.with_name(f".{target.name}.old.tmp")
        os.replace(target, aside)
        os.replace(staging, target)
        shutil.rmtree(aside)
    else:
        os.replace(staging, target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _try(action: Any) -> str | None:
    try:
        action()
    except Exception as error:
        return _reason(error)
    return None


def _shortage(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """What torch's writer does not say of a full disk."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < sum(tensor.nbytes for tensor in tensors.values()):
            return f" (the disk is full: {free / 2**20:.1f} MiB are left)"
    return ""


def _reason(error: BaseException) -> str:
    """The first line that says something, from the innermost cause DCP passes on."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(error).__name__}: {error}"


def _agree(world: World, failure: str | None) -> None:
    texts = [(rank, text) for rank, text in enumerate(world.gather(failure)) if text is not None]
    # DCP tells every rank of the one that failed; it is enough to say it once.
    reasons = dict.fromkeys(text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in texts)
    if reasons:
        raise CheckpointError(
            "the checkpoint was not written; the ones before it are untouched.\n  " + "\n  ".join(reasons)
        )
