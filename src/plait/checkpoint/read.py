"""Read any slice of a stored piece; every block that is read is compared with its digest."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from plait.checkpoint.manifest import INDEX_NAME, Checkpoint, StoredPiece, is_outside
from plait.checkpoint.tensorfile import (
    BLOCK,
    Slot,
    as_bytes,
    digest,
    read_all,
    read_header,
    slots_in,
    view_bytes,
)

_GROUP = 4 * BLOCK
"""Bytes read at a time into a buffer, if a slice has to be copied out of them."""
READ_BUFFER = _GROUP + 2 * BLOCK
"""Size of that buffer, one per thread: whole blocks are read, so there may be one more at either end."""


class DamagedError(Exception):
    """A file does not hold what was written; the message says which file and what differs."""


class RowRange:
    """The rows of a piece's first dimension that a slice needs, and their bytes."""

    def __init__(self, stored: StoredPiece, itemsize: int, low: Sequence[int], high: Sequence[int]) -> None:
        shape = stored.shape or (1,)
        self.row_bytes = math.prod(shape[1:]) * itemsize
        self.first_row, self.end_row = (low[0], high[0]) if stored.shape else (0, 1)
        self.whole_rows = all((a, b) == (0, n) for a, b, n in zip(low[1:], high[1:], shape[1:], strict=True))

    @property
    def bytes(self) -> tuple[int, int]:
        """The range of bytes of the piece that is needed: first byte, and end (exclusive)."""
        return self.first_row * self.row_bytes, self.end_row * self.row_bytes


def blocks_of(stored: StoredPiece, size: int, begin: int, end: int) -> tuple[int, int]:
    """Return the range of whole blocks, of a piece of `size` bytes, that covers a range of bytes."""
    assert 0 <= begin <= end <= size, (stored, size, begin, end)
    return begin // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, size)


class PieceReader:
    """Reads from the files of one checkpoint; may be used by several threads."""

    def __init__(
        self, folder: Path, elsewhere: Mapping[str, Path] | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        """`elsewhere`: paths of files that are not in the folder, by file name.

        With a `checkpoint`, the header of each file is compared with the manifest and the index when it is opened.
        """
        self._folder = folder
        self._elsewhere = elsewhere or {}
        self._checkpoint = checkpoint
        self._slots = checkpoint.index.slots() if checkpoint is not None else {}
        self._files: dict[str, int] = {}
        self._opening = threading.Lock()
        self._thread_local = threading.local()

    def copy(
        self, stored: StoredPiece, dtype: torch.dtype, low: Sequence[int], high: Sequence[int], target: Tensor
    ) -> None:
        """Copy the slice from index `low` to `high` of the piece into `target`, which has the slice's shape."""
        span = RowRange(stored, dtype.itemsize, low, high)
        if target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype and span.whole_rows:
            self._read_direct(stored, span.bytes, _size(stored, dtype), as_bytes(target))
            return
        inner = tuple(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True))
        if not stored.shape:
            target, inner = target.reshape(1), ()
        rows = max(1, _GROUP // max(span.row_bytes, 1))
        for first in range(span.first_row, span.end_row, rows):
            last = min(first + rows, span.end_row)
            buffer = self._read_buffered(
                stored, dtype, first * span.row_bytes, last * span.row_bytes, pinned=target.is_cuda
            )
            group = buffer.view(dtype).view(last - first, *stored.shape[1:])
            target[first - span.first_row : last - span.first_row].copy_(group[(slice(None), *inner)])

    def _read_direct(self, stored: StoredPiece, wanted: tuple[int, int], size: int, target: memoryview) -> None:
        """Read whole blocks straight into the target; if the first or last one is needed in part, through a buffer."""
        begin, end = wanted
        for block in range(begin // BLOCK * BLOCK, end, BLOCK):
            block_end = min(block + BLOCK, size)
            if begin <= block and block_end <= end:
                self._read(stored, block, target[block - begin : block_end - begin])
                continue
            buffer = memoryview(bytearray(block_end - block))
            self._read(stored, block, buffer)
            low, high = max(begin, block), min(end, block_end)
            target[low - begin : high - begin] = buffer[low - block : high - block]

    def _read_buffered(self, stored: StoredPiece, dtype: torch.dtype, begin: int, end: int, *, pinned: bool) -> Tensor:
        """Return the bytes from `begin` to `end`, in a buffer that the next call of this thread overwrites."""
        low, high = blocks_of(stored, _size(stored, dtype), begin, end)
        buffer: Tensor | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or buffer.numel() < high - low:
            buffer = self._thread_local.buffer = torch.empty(
                max(high - low, READ_BUFFER), dtype=torch.uint8, pin_memory=pinned
            )
        view = view_bytes(buffer)
        for block in range(low, high, BLOCK):
            self._read(stored, block, view[block - low : min(block + BLOCK, high) - low])
        return buffer[begin - low : end - low]

    def check(self, stored: StoredPiece, dtype: torch.dtype) -> None:
        """Read a whole piece and raise `DamagedError` if a block differs from its digest."""
        size = _size(stored, dtype)
        buffer = memoryview(bytearray(min(BLOCK, size)))
        for block in range(0, size, BLOCK):
            self._read(stored, block, buffer[: min(BLOCK, size - block)])

    def _read(self, stored: StoredPiece, block: int, buffer: memoryview) -> None:
        """Fill `buffer` with one whole block of a piece, and compare it with its digest."""
        try:
            filled = read_all(self._open(stored.file), buffer, stored.begin + block)
        except OSError as error:
            raise DamagedError(f"{self._path(stored.file)} cannot be read: {error.strerror}") from error
        if not filled:
            raise DamagedError(f"{self._path(stored.file)} is shorter than what was written")
        if digest(buffer) != stored.digests[block // BLOCK]:
            at = stored.begin + block
            raise DamagedError(
                f"{self._path(stored.file)} was changed after it was written (its checksum differs, "
                f"in bytes {at} to {at + len(buffer)})"
            )

    def _path(self, name: str) -> Path:
        return self._elsewhere.get(name, self._folder / name)

    def _open(self, name: str) -> int:
        with self._opening:
            if name not in self._files:
                path = self._path(name)
                if name not in self._elsewhere and is_outside(self._folder, name):
                    raise DamagedError(f"{path} is a link that leads out of the checkpoint; copy the file itself")
                try:
                    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
                except FileNotFoundError as error:
                    raise DamagedError(f"{path} is missing") from error
                try:
                    if self._checkpoint is not None:
                        self._compare_header(self._checkpoint, name, file)
                except BaseException:
                    os.close(file)
                    raise
                self._files[name] = file
            return self._files[name]

    def _compare_header(self, checkpoint: Checkpoint, name: str, file: int) -> None:
        """Raise `DamagedError` if a file's header is not as written, or lists other tensors than the index."""
        path, record = self._path(name), checkpoint.manifest.files[name]
        try:
            header = read_header(file)
            size = os.fstat(file).st_size
            if name not in self._elsewhere and size != record.bytes:
                raise DamagedError(f"{path} has {size} bytes, {record.bytes} were written")
            if digest(header) != record.digest:
                raise DamagedError(f"{path} was changed after it was written (the checksum of its header differs)")
            slots, expected = slots_in(header, record.bytes), self._slots[name]
        except ValueError as error:
            raise DamagedError(f"{path} is not a complete safetensors file: {error}") from error
        if slots != expected:
            wrong = min(key for key in slots.keys() | expected.keys() if slots.get(key) != expected.get(key))
            in_file, in_index = _describe_slot(slots.get(wrong)), _describe_slot(expected.get(wrong))
            raise DamagedError(f"{path}: its header has {wrong} as {in_file}, but {INDEX_NAME} has it as {in_index}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe_slot(slot: Slot | None) -> str:
    if slot is None:
        return "absent"
    return f"{str(slot.dtype).removeprefix('torch.')} {slot.shape} at byte {slot.begin}"


def _size(stored: StoredPiece, dtype: torch.dtype) -> int:
    return torch.Size(stored.shape).numel() * dtype.itemsize


def try_to_read(read: Callable[..., None], *given: Any) -> str | None:
    """Call `read(*given)`; return what is wrong with the file, None if nothing is."""
    try:
        read(*given)
    except DamagedError as error:
        return str(error)
    return None
