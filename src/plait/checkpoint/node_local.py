"""Checkpoints of `checkpoint.node_local`: each node stores the files of its ranks, and fetches others if needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from plait.checkpoint.folder import CheckpointFolder, no_checkpoint_at
from plait.checkpoint.load import LoadRegion
from plait.checkpoint.manifest import INDEX_NAME, Checkpoint, Manifest, open_checkpoint, read_manifest
from plait.checkpoint.ranks import Disks, collective_call
from plait.checkpoint.read import RowRange, blocks_of
from plait.checkpoint.tensorfile import BLOCK, read_all, view_bytes, write_all
from plait.distributed import Channel
from plait.errors import CheckpointError


class _Copy(NamedTuple):
    """The files of one checkpoint that one node has."""

    manifest: Manifest
    files: frozenset[str]
    """The files that are there and have their full length."""


@dataclass(frozen=True)
class NodeLocalCheckpoint:
    """One checkpoint, and for each of its files a rank that can read it."""

    checkpoint: Checkpoint
    owners: Mapping[str, int]
    channel: Channel

    @cached_property
    def _head_ends(self) -> dict[str, int]:
        """Return by file name the byte at which the header ends and the first tensor begins."""
        head_ends: dict[str, int] = {}
        for record in self.checkpoint.index.tensors.values():
            for stored in record.pieces:
                head_ends[stored.file] = min(stored.begin, head_ends.get(stored.file, stored.begin))
        return head_ends

    @contextmanager
    def fetch(self, regions: list[LoadRegion]) -> Iterator[Mapping[str, Path]]:
        """Copy the bytes that this rank needs from other nodes, if its node lacks them; yield the paths of the copies.

        See `load.Fetch`. Collective.
        """
        folder, rank = self.checkpoint.folder, self.channel.rank
        sizes = {name: record.bytes for name, record in self.checkpoint.manifest.files.items()}
        absent = [region for region in regions if not _is_whole(folder / region.stored.file, sizes)]
        heads = {(name, 0, self._head_ends[name]) for name in {region.stored.file for region in absent}}
        missing = sorted({_range(region) for region in absent} | heads)
        scratch = folder.parent / f".fetched-{rank}"
        try:
            make = partial(scratch.mkdir, parents=True, exist_ok=True)
            collective_call(self.channel, make if missing else None, "files of other nodes cannot be fetched")
            self._exchange(missing, scratch)
            yield {name: scratch / name for name, _, _ in missing}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _exchange(self, missing: list[tuple[str, int, int]], scratch: Path) -> None:
        # All ranks iterate over the same list, so that every send has a matching receive.
        buffer = torch.empty(BLOCK, dtype=torch.uint8)
        for target, wanted in enumerate(self.channel.all_gather(missing)):
            for name, begin, end in wanted:
                source = self.owners[name]
                if self.channel.rank not in (source, target):
                    continue
                for at in range(begin, end, BLOCK):
                    block = buffer[: min(BLOCK, end - at)]
                    if self.channel.rank == source:
                        _read_range(self.checkpoint.folder / name, at, block)
                    self.channel.pass_on(block, source=source, target=target)
                    if self.channel.rank == target:
                        _write_range(scratch / name, at, block)


def find_node_local(
    folder: CheckpointFolder, wanted: str, channel: Channel, disks: Disks
) -> NodeLocalCheckpoint | None:
    """Return the newest checkpoint whose files are all present, each on some node. Collective.

    If no node has any checkpoint, return None for `auto`. Raise `CheckpointError` in all other cases.
    """
    copies = channel.all_gather(_copies(folder, wanted) if disks.is_lead else {})
    manifests = {name: saved.manifest for copy in copies for name, saved in copy.items()}
    if not manifests:
        if wanted == "auto":
            return None
        raise no_checkpoint_at(wanted)
    lacking: dict[str, list[str]] = {}
    for name, manifest in sorted(manifests.items(), key=lambda item: -item[1].saved_at):
        owners = {
            file: rank
            for rank, copy in reversed(list(enumerate(copies)))
            if name in copy and copy[name].manifest.saved_at == manifest.saved_at
            for file in copy[name].files
        }
        lacking[name] = sorted(manifest.files.keys() - owners.keys())
        if lacking[name]:
            continue
        # A checkpoint has the same folder name on every node, but the path above it may differ.
        paths = {path.name: path for path in folder.candidates(wanted)} if disks.is_lead else {}
        path = paths.get(name, folder.path_of(manifest.step))
        opened = _open_at(owners[INDEX_NAME], path, channel)
        leading_path = channel.all_gather(path)[disks.lead]
        return NodeLocalCheckpoint(Checkpoint(leading_path, opened.manifest, opened.index), owners, channel)
    lines = "\n  ".join(f"{name}: no node has {', '.join(files)}" for name, files in lacking.items())
    raise CheckpointError(f"no checkpoint at {wanted!r} has all of its files:\n  {lines}")


def _open_at(home: int, path: Path, channel: Channel) -> Checkpoint:
    """Return on all ranks the checkpoint that rank `home` opens: its node has the index. Collective."""
    open_it = partial(open_checkpoint, path) if channel.rank == home else None
    opened = collective_call(channel, open_it, "the checkpoint cannot be opened")
    checkpoint: Checkpoint = channel.all_gather(opened)[home]
    return checkpoint


def _copies(folder: CheckpointFolder, wanted: str) -> dict[str, _Copy]:
    copies: dict[str, _Copy] = {}
    for path in folder.candidates(wanted):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # another node may have a copy that can be read
        sizes = {name: record.bytes for name, record in manifest.files.items()}
        copies[path.name] = _Copy(manifest, frozenset(name for name in sizes if _is_whole(path / name, sizes)))
    return copies


def _is_whole(path: Path, sizes: Mapping[str, int]) -> bool:
    return path.is_file() and path.stat().st_size == sizes[path.name]


def _range(region: LoadRegion) -> tuple[str, int, int]:
    """Return the file, and the range of its bytes, that a region is read from."""
    stored, size = region.stored, torch.Size(region.stored.shape).numel() * region.dtype.itemsize
    begin, end = blocks_of(stored, size, *RowRange(stored, region.dtype.itemsize, region.low, region.high).bytes)
    return stored.file, stored.begin + begin, stored.begin + end


def _read_range(path: Path, at: int, into: torch.Tensor) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        read_all(file, view_bytes(into), at)  # the receiving rank compares it with its digest
    finally:
        os.close(file)


def _write_range(path: Path, at: int, data: torch.Tensor) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        write_all(file, view_bytes(data), at)
    finally:
        os.close(file)
