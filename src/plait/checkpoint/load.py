"""Read a checkpoint into tensors of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.checkpoint.manifest import Manifest, checksum
from plait.errors import CheckpointError
from plait.world import World


def verify(folder: Path, manifest: Manifest, *, world: World) -> None:
    """Compare every file with what was written; ranks share the work, and all raise if one finds damage."""
    problems = []
    for index, (name, record) in enumerate(sorted(manifest.files.items())):
        if index % world.size != world.rank:
            continue
        path = folder / name
        if not path.exists():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size} bytes, {record.bytes} were written")
        elif checksum(path) != record:
            problems.append(f"{path} was changed after it was written (its checksum differs)")
    found = [problem for part in world.gather(problems) for problem in part]
    if found:
        raise CheckpointError(
            "the checkpoint is damaged:\n  " + "\n  ".join(found) + "\nset checkpoint.resume to an earlier one"
        )


def load_into(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], *, world: World, ignore: Iterable[str] = ()) -> None:
    """Fill the tensors from a checkpoint; each rank reads only what its part needs.

    Strict: every name must be on both sides, with the same shape. Checkpoint entries whose names start with
    one of `ignore` may be left unread.
    """
    problems = [f"missing in the checkpoint: {name}" for name in tensors if name not in manifest.tensors]
    for name, entry in manifest.tensors.items():
        if name not in tensors:
            if not name.startswith(tuple(ignore)):
                problems.append(f"not wanted by this model: {name} {tuple(entry['shape'])}")
        elif list(tensors[name].shape) != entry["shape"]:
            problems.append(f"{name}: {tuple(entry['shape'])} in the checkpoint, {tuple(tensors[name].shape)} in the model")
    if problems:
        shown = problems[:40] + ([f"… and {len(problems) - 40} more"] if len(problems) > 40 else [])
        raise CheckpointError(f"{folder} does not fit this model:\n  " + "\n  ".join(shown))
    dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder), no_dist=world.size == 1)


def entries(manifest: Manifest, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the entries under a prefix, which is taken off their names."""
    return {
        name.removeprefix(prefix): (torch.Size(entry["shape"]), getattr(torch, entry["dtype"]))
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }
