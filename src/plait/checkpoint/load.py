"""Read a checkpoint into tensors of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.manifest import Manifest, checksum
from plait.checkpoint.quiet import quiet_single_process
from plait.errors import CheckpointError
from plait.world import World

_SHOWN = 16
"""Rows of the table of misfits: the whole message has to fit on a screen."""


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
            "the checkpoint is damaged:\n  " + "\n  ".join(found) + f"\nremove {folder}, and `checkpoint.resume: auto` "
            "goes on from the one before it"
        )


def load_into(
    folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], *, world: World, ignore: Iterable[str] = ()
) -> None:
    """Fill the tensors from a checkpoint; each rank reads only what its part needs.

    Strict: every name must be on both sides, with the same shape. Checkpoint entries whose names start with
    one of `ignore` may be left unread.
    """
    wrong = _misfits(manifest, tensors, tuple(ignore))
    if wrong:
        raise CheckpointError(f"{folder} does not fit this model:\n" + _table(wrong))
    # Late: [Note: DTensor is loaded late]
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with quiet_single_process():
        load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=world.size == 1)


Misfit = tuple[str, str, str]
"""A tensor's name, its shape in the checkpoint and its shape in the model; `-` where there is none."""


def _misfits(manifest: Manifest, tensors: Mapping[str, Tensor], ignore: tuple[str, ...]) -> list[Misfit]:
    found: list[Misfit] = []
    for name in sorted(tensors.keys() | manifest.tensors.keys()):
        here, there = tensors.get(name), manifest.tensors.get(name)
        if here is None and name.startswith(ignore):
            continue
        ours = "-" if here is None else str(tuple(here.shape))
        theirs = "-" if there is None else str(tuple(there["shape"]))
        if ours != theirs:
            found.append((name, theirs, ours))
    # What the optimizer keeps follows the parameters: it is news only where they are right.
    return [row for row in found if row[0].startswith("model.")] or found


def _table(rows: list[Misfit]) -> str:
    shown = [("tensor", "in the checkpoint", "in the model"), *rows[:_SHOWN]]
    names, theirs = (max(len(row[column]) for row in shown) for column in (0, 1))
    lines = [f"  {name:<{names}}  {there:<{theirs}}  {here}" for name, there, here in shown]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} more")
    return "\n".join(lines)


def entries(manifest: Manifest, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the entries under a prefix, which is taken off their names."""
    return {
        name.removeprefix(prefix): (torch.Size(entry["shape"]), getattr(torch, entry["dtype"]))
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }
