"""Tensors side by side in one file."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops import FileQueue, TensorFile, Transfer, rounded

Key = tuple[int, str]
"""The number of a parameter, and which of its tensors: its own name in the optimizer's state, or `weight`."""


class Place(NamedTuple):
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: torch.Size
    at: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, room: Tensor) -> Tensor:
        """The tensor in a copy of the whole file."""
        return room[self.at : self.at + self.bytes].view(self.dtype).view(self.shape)


class Shelf:
    """A file without a name that holds the tensors of one bucket: read and written as one, gone with the process."""

    def __init__(self, queue: FileQueue, folder: Path, tensors: Iterable[tuple[Key, torch.dtype, torch.Size]]) -> None:
        self.places: dict[Key, Place] = {}
        size = 0
        for key, dtype, shape in tensors:
            place = Place(dtype, shape, size)
            self.places[key] = place
            size += rounded(place.bytes)
        self.size = size
        self.file = TensorFile.scratch(queue, folder, max(size, 1))
        # When the last request is over that still knows the file: a number that is free again may be another's.
        weakref.finalize(self.file, os.close, self.file.descriptor)

    def put(self, key: Key, tensor: Tensor) -> Transfer:
        """Write one tensor."""
        return self.file.write_from(tensor, self.places[key].at)

    def read(self, room: Tensor) -> Transfer:
        """Fill a room of `size` bytes."""
        return self.file.read_into(room[: self.size], 0)

    def write(self, room: Tensor) -> Transfer:
        """Write a room of `size` bytes back to the file."""
        return self.file.write_from(room[: self.size], 0)

    def sync(self) -> None:
        """Let the disk have what was written into `mapped` tensors: direct requests do not look at the page cache."""
        os.fdatasync(self.file.descriptor)

    def views(self, room: Tensor) -> dict[Key, Tensor]:
        """The tensors in a room."""
        return {key: place.view(room) for key, place in self.places.items()}

    def mapped(self) -> Mapping[Key, Tensor]:
        """The tensors as memory of the file itself: a page is read when it is touched, and written when it changes.

        For checkpoints, which pass over everything once. Drop them before the next `read`.
        """
        if self.size == 0:
            return self.views(torch.empty(0, dtype=torch.uint8))
        memory = mmap.mmap(self.file.descriptor, self.size)
        return self.views(torch.frombuffer(memory, dtype=torch.uint8))
