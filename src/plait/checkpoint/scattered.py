"""A checkpoint whose files lie on several nodes: found together, and fetched from each other where needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from plait.checkpoint import manifest as index_file
from plait.checkpoint.folder import CheckpointFolder, nothing_at
from plait.checkpoint.load import LoadRegion
from plait.checkpoint.manifest import Checkpoint, Manifest, open_checkpoint, read_manifest
from plait.checkpoint.ranks import Disks, attempt, together
from plait.checkpoint.read import ByteRange, blocks_of
from plait.checkpoint.tensorfile import BLOCK, read_all, view_bytes, write_all
from plait.distributed import Channel
from plait.errors import CheckpointError


class _Copy(NamedTuple):
    """What one node has of one checkpoint."""

    manifest: Manifest
    files: frozenset[str]
    """Those of its files that are there in full length."""


@dataclass(frozen=True)
class Scattered:
    """One checkpoint, and for each of its files a rank that can read it."""

    checkpoint: Checkpoint
    owners: Mapping[str, int]
    channel: Channel

    @cached_property
    def _head_ends(self) -> dict[str, int]:
        """Where the head of each file ends, and its first tensor begins."""
        ends: dict[str, int] = {}
        for record in self.checkpoint.index.tensors.values():
            for stored in record.pieces:
                ends[stored.file] = min(stored.begin, ends.get(stored.file, stored.begin))
        return ends

    @contextmanager
    def fetch(self, parts: list[LoadRegion]) -> Iterator[Mapping[str, Path]]:
        """Bring what this rank needs and its node does not have from a node that has it; see `load.Fetch`."""
        folder, rank = self.checkpoint.folder, self.channel.rank
        sizes = {name: record.bytes for name, record in self.checkpoint.manifest.files.items()}
        absent = [part for part in parts if not _is_whole(folder / part.stored.file, sizes)]
        heads = {(name, 0, self._head_ends[name]) for name in {part.stored.file for part in absent}}
        missing = sorted({_range(part) for part in absent} | heads)
        place = folder.parent / f".fetched-{rank}"
        try:
            failure = attempt(lambda: place.mkdir(parents=True, exist_ok=True)) if missing else None
            together(self.channel, failure, "what other nodes hold cannot be fetched")
            self._exchange(missing, place)
            yield {name: place / name for name, _, _ in missing}
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _exchange(self, missing: list[tuple[str, int, int]], place: Path) -> None:
        # All ranks walk through the same list, so that every send meets its receive.
        room = torch.empty(BLOCK, dtype=torch.uint8)
        for target, wanted in enumerate(self.channel.all_gather(missing)):
            for name, begin, end in wanted:
                source = self.owners[name]
                if self.channel.rank not in (source, target):
                    continue
                for at in range(begin, end, BLOCK):
                    part = room[: min(BLOCK, end - at)]
                    if self.channel.rank == source:
                        _read_range(self.checkpoint.folder / name, at, part)
                    self.channel.pass_on(part, source=source, target=target)
                    if self.channel.rank == target:
                        _write_range(place / name, at, part)


def find_scattered(folder: CheckpointFolder, wanted: str, channel: Channel, disks: Disks) -> Scattered | None:
    """The newest checkpoint of which the nodes together have every file. Every rank must call it."""
    copies = channel.all_gather(_copies(folder, wanted) if disks.is_lead else {})
    manifests = {name: copy.manifest for each in copies for name, copy in each.items()}
    if not manifests:
        if wanted == "auto":
            return None
        raise nothing_at(wanted)
    lacking: dict[str, list[str]] = {}
    for name, manifest in sorted(manifests.items(), key=lambda item: -item[1].saved_at):
        owners = {
            file: rank
            for rank, each in reversed(list(enumerate(copies)))
            if name in each and each[name].manifest.saved_at == manifest.saved_at
            for file in each[name].files
        }
        lacking[name] = sorted(manifest.files.keys() - owners.keys())
        if lacking[name]:
            continue
        # A rank's own folder has the name of the others', under its own root, whether there is something in it or not.
        paths = {path.name: path for path in folder.candidates(wanted)} if disks.is_lead else {}
        path = paths.get(name, folder.path_of(manifest.step))
        opened = _open_at(owners[index_file.INDEX_NAME], path, channel)
        here = channel.all_gather(path)[disks.lead]
        return Scattered(Checkpoint(here, opened.manifest, opened.index), owners, channel)
    told = "\n  ".join(f"{name}: no node has {', '.join(files)}" for name, files in lacking.items())
    raise CheckpointError(f"of no checkpoint at {wanted!r} all files are there:\n  {told}")


def _open_at(home: int, path: Path, channel: Channel) -> Checkpoint:
    """What the rank that has the index says a checkpoint holds. Every rank must call it."""
    found: list[Checkpoint] = []
    failure = attempt(lambda: found.append(open_checkpoint(path))) if channel.rank == home else None
    together(channel, failure, "the checkpoint cannot be opened")
    opened: Checkpoint = channel.all_gather(found[0] if found else None)[home]
    return opened


def _copies(folder: CheckpointFolder, wanted: str) -> dict[str, _Copy]:
    found: dict[str, _Copy] = {}
    for path in folder.candidates(wanted):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # another node may have a copy that can be read
        sizes = {name: record.bytes for name, record in manifest.files.items()}
        found[path.name] = _Copy(manifest, frozenset(name for name in sizes if _is_whole(path / name, sizes)))
    return found


def _is_whole(path: Path, sizes: Mapping[str, int]) -> bool:
    return path.is_file() and path.stat().st_size == sizes[path.name]


def _range(part: LoadRegion) -> tuple[str, int, int]:
    """The bytes of its file that a part is read from."""
    stored, size = part.stored, torch.Size(part.stored.shape).numel() * part.dtype.itemsize
    begin, end = blocks_of(stored, size, *ByteRange(stored, part.dtype.itemsize, part.low, part.high).bytes)
    return stored.file, stored.begin + begin, stored.begin + end


def _read_range(path: Path, at: int, into: torch.Tensor) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        read_all(file, view_bytes(into), at)  # what is wrong with it, the reader on the other side finds out
    finally:
        os.close(file)


def _write_range(path: Path, at: int, data: torch.Tensor) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        write_all(file, view_bytes(data), at)
    finally:
        os.close(file)
