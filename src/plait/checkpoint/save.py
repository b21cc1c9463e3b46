"""Write a checkpoint so that a kill at any moment leaves the last good one usable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.checkpoint.manifest import FileRecord, Manifest, checksum
from plait.errors import CheckpointError
from plait.world import World


def save_checkpoint(
    target: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, step: int, world: World
) -> int:
    """Write all ranks' tensors to `target`; returns its size in bytes.

    Everything goes to a hidden folder beside it, reaches the disk, gets its manifest, and only then its name.
    Every rank must call it; if one fails, all raise, and what was there before is untouched.
    """
    staging = target.with_name(f".{target.name}.tmp")
    _agree(world, _try(lambda: _make_staging(staging)) if world.is_main else None)
    try:
        dcp.save(
            dict(tensors),
            storage_writer=dcp.FileSystemWriter(staging, sync_files=True, overwrite=True),
            no_dist=world.size == 1,
        )
        failure = None
    except Exception as error:  # DCP raises on every rank, with each rank's own reason
        failure = _reason(error)
    _agree(world, failure)
    written: dict[str, FileRecord] = {}
    _agree(world, _try(lambda: written.update(_records(staging, world))))
    files = {name: record for part in world.gather(written) for name, record in part.items()}
    if world.is_main:
        failure = _try(lambda: _complete(staging, target, files, tensors, state, step=step, world=world))
    _agree(world, failure)
    return sum(record.bytes for record in files.values())


def _make_staging(staging: Path) -> None:
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)


def _records(staging: Path, world: World) -> dict[str, FileRecord]:
    mine = f"__{world.rank}_"
    return {p.name: checksum(p) for p in staging.iterdir() if p.name.startswith(mine) or (world.is_main and p.name == ".metadata")}


def _complete(
    staging: Path,
    target: Path,
    files: dict[str, FileRecord],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    step: int,
    world: World,
) -> None:
    from plait import __version__

    Manifest(
        step=step,
        world_size=world.size,
        files=files,
        tensors={
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in tensors.items()
        },
        state=dict(state),
        versions={"plait": __version__, "torch": torch.__version__},
    ).write(staging)
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


def _reason(error: Exception) -> str:
    """The first line that says something, from the innermost cause DCP passes on."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(error).__name__}: {error}"


def _agree(world: World, failure: str | None) -> None:
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(world.gather(failure)) if text is not None]
    if reasons:
        raise CheckpointError(
            "the checkpoint was not written; the ones before it are untouched.\n  " + "\n  ".join(reasons)
        )
