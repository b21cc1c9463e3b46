"""Write a checkpoint so that a kill at any moment leaves the last complete one usable."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.checkpoint.manifest import INDEX_NAME, FileRecord, Index, Manifest, StoredPiece, save_time, write_text
from plait.checkpoint.memory import WRITERS, thread_count
from plait.checkpoint.pieces import Entry, HeldPiece, Piece, Staging, WriteAssignment, held_pieces
from plait.checkpoint.ranks import Disks, collective_call, find_disks
from plait.checkpoint.read import PieceReader
from plait.checkpoint.storage import StoredCheckpoints
from plait.checkpoint.tensorfile import TensorFileWriter, digest, read_slots
from plait.distributed import Channel, World
from plait.errors import CheckpointError
from plait.monitor import format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete on the disk."""

    path: Path
    bytes: int
    seconds: float
    """Seconds from the call of `save` to the end of writing."""
    blocked: float
    """Seconds for which training waited."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time. Collective: every rank calls its methods in the same order.

    All ranks write and sync their files in a hidden folder beside the target; then the manifest is written there, and
    the folder is renamed to the target. If one rank fails, all raise, and earlier checkpoints are untouched. With
    `background`, `save` returns once this rank's pieces are copied to host memory; `poll` or `wait` give the outcome.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        background: bool = False,
        node_local: bool = False,
        reopen: bool = False,
        storage: StoredCheckpoints | None = None,
    ) -> None:
        """`reopen`: read every file again and compare it with what was written; `storage`: where copies are kept."""
        self._storage = storage
        self._root = root
        self._world = world
        self._node_local = node_local
        self._reopen = reopen
        # With `node_local`, files are sent between nodes as CPU tensors, which not every backend (NCCL) can send.
        self.channel = Channel(world, new_group=background or node_local)
        self._shares = WriteAssignment(self.channel)
        self._staging = Staging() if background else None
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._disks: Disks | None = None

    @property
    def disks(self) -> Disks:
        """Which ranks see which folder; the first access is collective."""
        if self._disks is None:
            self._disks = find_disks(self._root, self.channel, self._world.ranks, node_local=self._node_local)
        return self._disks

    def save(
        self,
        target: Path,
        tensors: Mapping[str, Entry],
        state: Mapping[str, Any],
        *,
        step: int,
        tidy: Callable[[], None] | None = None,
    ) -> Saved | None:
        """Write a checkpoint and return the outcome; with `background`, return None while it is written.

        `tidy` is called when it is complete, on one rank of each folder.
        """
        assert self._thread is None, "wait for the one before"
        start = time.perf_counter()
        disks = self.disks
        mine = self._shares.mine(held_pieces(tensors))
        job = _SaveJob(
            target, dict(state), step, self._world.size, self.channel, disks, self._reopen, self._storage, tidy
        )
        if self._staging is None:
            threads = thread_count(WRITERS, cores=os.cpu_count() or 1, ranks=self._world.ranks.local_size)
            size = job.run(mine, threads=threads)
            seconds = time.perf_counter() - start
            return Saved(target, size, seconds, blocked=seconds)
        copies = self._staging.copy(mine)
        blocked = time.perf_counter() - start

        def work() -> None:
            try:
                size = job.run(copies, threads=1)
                self._outcome = Saved(target, size, time.perf_counter() - start, blocked)
            except BaseException as error:
                self._outcome = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()
        return None

    @property
    def busy(self) -> bool:
        """Whether a save in the background still runs, or its outcome was not returned by `poll` or `wait` yet."""
        return self._thread is not None

    def poll(self) -> Saved | None:
        """Return the outcome of a save in the background if it has ended, else None. Raise the error if it failed."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """Wait for a save in the background and return its outcome, or raise its error; None if there was no save."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """Close the channel. The outcome of a save in the background is dropped: call `wait` before to get it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.channel.close()


def save_checkpoint(
    target: Path, tensors: Mapping[str, Entry], state: Mapping[str, Any], *, step: int, world: World
) -> int:
    """Write one checkpoint and return its size in bytes. Collective."""
    saved = CheckpointWriter(target.parent, world).save(target, tensors, state, step=step)
    assert saved is not None
    return saved.bytes


def write_single_process(
    target: Path,
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
    read: Callable[[str], Tensor],
    state: Mapping[str, Any],
    *,
    step: int,
) -> int:
    """Write a checkpoint from one process and return its size in bytes; `read(name)` returns one tensor at a time."""
    staging = target.with_name(f".{target.name}.tmp")
    try:
        pieces = [
            Piece(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape))
            for name, (shape, dtype) in tensors.items()
        ]
        _make_staging(staging, sum(piece.bytes for piece in pieces))
        rank_file = _write_rank_file(
            staging / _file_name(0), [(piece, partial(_read_strips, read, piece)) for piece in pieces]
        )
        manifest, text = _make_manifest(target, [rank_file], dict(state), step=step, world_size=1)
        _write_manifest(staging, manifest, text)
        _publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest.bytes


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The file that one rank wrote, and the pieces in it."""

    file: str
    record: FileRecord
    pieces: list[tuple[Piece, StoredPiece]]


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """One checkpoint that is being written."""

    target: Path
    state: dict[str, Any]
    step: int
    world_size: int
    channel: Channel
    disks: Disks
    reopen: bool
    storage: StoredCheckpoints | None
    tidy: Callable[[], None] | None

    def run(self, mine: Sequence[HeldPiece], *, threads: int) -> int:
        """Write this rank's file and complete the checkpoint with the other ranks; return its size in bytes."""
        channel, staging = self.channel, self.target.with_name(f".{self.target.name}.tmp")
        try:
            needed = sum(held.piece.bytes for held in mine)
            sizes = [size for lead, size in channel.all_gather((self.disks.lead, needed)) if lead == self.disks.rank]
            self._on_leading_ranks(lambda: _make_staging(staging, sum(sizes)))
            files = channel.gather(self._call(lambda: self._write_own_file(staging, mine, threads)))
            manifest, text = self._call(None if files is None else partial(self._manifest, files)) or (None, None)
            if not self.disks.shared:
                manifest, text = channel.broadcast((manifest, text))
            self._on_leading_ranks(lambda: _write_manifest(staging, manifest, text))
            self._on_leading_ranks(lambda: _publish(staging, self.target))
        except CheckpointError:
            if self.disks.is_lead:
                shutil.rmtree(staging, ignore_errors=True)  # on a full disk it would leave no space for the next one
            raise
        if self.storage is not None:
            self._copy_to(self.storage)
        if self.tidy is not None:
            text = f"{self.target} is saved, but older checkpoints could not be removed or links not moved"
            collective_call(channel, self.tidy if self.disks.is_lead else None, text)
        return int(channel.broadcast(None if manifest is None else manifest.bytes))

    def _manifest(self, files: Sequence[_RankFile]) -> tuple[Manifest, str]:
        return _make_manifest(self.target, files, self.state, step=self.step, world_size=self.world_size)

    def _copy_to(self, storage: StoredCheckpoints) -> None:
        """Copy the checkpoint to a storage; see [Note: local first] in `plait.checkpoint.storage`."""
        text = f"{self.target} is saved, but could not be copied to `checkpoint.storage`"
        for action, is_mine in (
            (storage.clear, self.channel.rank == 0),
            (storage.put, self.disks.is_lead),
            (storage.seal, self.channel.rank == 0),
        ):
            collective_call(self.channel, partial(action, self.target) if is_mine else None, text)

    def _on_leading_ranks(self, action: Callable[[], None]) -> None:
        self._call(action if self.disks.is_lead else None)

    def _call(self, action: Callable[[], T] | None) -> T | None:
        return collective_call(
            self.channel, action, f"{self.target} was not written; the checkpoints before it are untouched"
        )

    def _write_own_file(self, staging: Path, mine: Sequence[HeldPiece], threads: int) -> _RankFile:
        path = staging / _file_name(self.channel.rank)
        written = _write_rank_file(path, [(held.piece, held.strips) for held in mine], threads=threads)
        if self.reopen:
            _verify_rank_file(path, written)
        return written


def _read_strips(read: Callable[[str], Tensor], piece: Piece) -> list[Tensor]:
    return [read(piece.name)]


PieceStrips = tuple[Piece, Callable[[], Iterable[Tensor]]]
"""A piece, and a function that yields its values in strips of rows."""


def _write_rank_file(path: Path, tensors: Sequence[PieceStrips], *, threads: int = 1) -> _RankFile:
    with TensorFileWriter(path, [(piece.key, piece.dtype, piece.shape) for piece, _ in tensors]) as file:

        def write(item: PieceStrips) -> tuple[Piece, StoredPiece]:
            piece, strips = item
            digests = tuple(file.write_strips(piece.key, strips()))
            return piece, StoredPiece(path.name, file.slots[piece.key].begin, piece.start, piece.shape, digests)

        if threads == 1:
            stored = [write(item) for item in tensors]
        else:
            with ThreadPoolExecutor(threads) as pool:
                stored = list(pool.map(write, tensors))
    return _RankFile(path.name, FileRecord(file.size, file.header_digest), stored)


def _verify_rank_file(path: Path, written: _RankFile) -> None:
    """Read a file again; raise if its names, shapes or any block differ from what was written."""
    slots = read_slots(path)
    wanted = {piece.key: (piece.dtype, piece.shape) for piece, _ in written.pieces}
    if {key: (slot.dtype, slot.shape) for key, slot in slots.items()} != wanted:
        raise OSError(f"{path} was written, but its header does not have the expected names and shapes")
    with PieceReader(path.parent) as reader:
        for piece, stored in written.pieces:
            reader.check(stored, piece.dtype)


def _make_manifest(
    target: Path, written: Sequence[_RankFile], state: dict[str, Any], *, step: int, world_size: int
) -> tuple[Manifest, str]:
    text = Index.of(pair for rank_file in written for pair in rank_file.pieces).text()
    files = {rank_file.file: rank_file.record for rank_file in written}
    files[INDEX_NAME] = FileRecord(len(text.encode()), digest(text.encode()))
    versions = {"plait": _own_version(), "torch": torch.__version__}
    return Manifest(step, world_size, files, state, versions, save_time(target.parent)), text


def _own_version() -> str:
    try:
        return version("plait")
    except PackageNotFoundError:  # run from its sources, not installed
        return "unknown"


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _make_staging(staging: Path, needed: int) -> None:
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    free = shutil.disk_usage(staging).free
    if free < needed:
        left, size = format_bytes(free), format_bytes(needed)
        raise OSError(f"the disk is full: {staging.parent} has {left} left, the checkpoint takes {size}")


def _write_manifest(staging: Path, manifest: Manifest | None, text: str | None) -> None:
    assert manifest is not None
    assert text is not None
    write_text(staging / INDEX_NAME, text)
    manifest.write(staging)
    sync_to_disk(staging)


def _publish(staging: Path, target: Path) -> None:
    if target.exists():
        # The same step, saved again: the old one is renamed until the new one is in place.
        previous = target.with_name(f".{target.name}.old.tmp")
        os.replace(target, previous)
        os.replace(staging, target)
        shutil.rmtree(previous)
    else:
        os.replace(staging, target)
    sync_to_disk(target.parent)


def sync_to_disk(path: Path) -> None:
    """Call fsync for a file, or for a folder, so that the names in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
