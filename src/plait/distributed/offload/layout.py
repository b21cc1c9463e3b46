"""Which parameters are updated as one, and where their state lives."""

from __future__ import annotations

import copy
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.kernels import FileQueue, FileTransfer, TensorFile, rounded

Home = Literal["device", "cpu", "nvme"]
Sink = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Parameters that are updated one after another, and the home of their state."""

    indices: tuple[int, ...]
    home: Home


def plan_spans(
    numels: Sequence[int], order: Sequence[int], *, limit: int, shares: Sequence[tuple[Home, float]]
) -> list[BucketSpan]:
    """Cut the parameters, taken in this order, into spans of at most `limit` numbers, or one that has more.

    Each home gets its share of all numbers, the fastest first: the next forward pass meets those first, and they are
    ready at once, while the CPU still works on the others. The last one takes the rest.
    """
    ends = [end * sum(numels) for end in accumulate(share for _, share in shares[:-1])]
    spans: list[BucketSpan] = []
    pending: list[int] = []
    size = passed = 0
    before = shares[-1][0]
    for index in order:
        numel = numels[index]
        passed += numel
        here = shares[next((place for place, end in enumerate(ends) if passed <= end), -1)][0]
        if pending and (size + numel > limit or here != before):
            spans.append(BucketSpan(tuple(pending), before))
            pending, size = [], 0
        before = here
        pending.append(index)
        size += numel
    if pending:
        spans.append(BucketSpan(tuple(pending), before))
    return spans


@dataclass(slots=True)
class Bucket:
    """Parameters that are updated as one."""

    span: BucketSpan
    targets: list[Tensor]
    """This rank's part of each parameter, as the model computes with it."""
    masters: list[nn.Parameter]
    """What the optimizer updates in their place."""
    sinks: list[Sink | None]
    """What takes the new weights of a parameter, where its target has no memory of its own."""
    optimizer: Optimizer | None = None
    """The optimizer, as if these were its only parameters."""
    update: Future[None] | None = None
    """The update in progress."""
    published: Any = None
    """A mark after the copies to the device of the last update."""
    home: Any = None
    """A mark: what the device updated is back in host memory."""

    @property
    def numel(self) -> int:
        """Numbers in all parameters."""
        return sum(target.numel() for target in self.targets)

    def items(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """(index, master, target) of each parameter."""
        return zip(self.span.indices, self.masters, self.targets, strict=True)


def twin(optimizer: Optimizer, masters: Sequence[Tensor]) -> Optimizer:
    """The same optimizer for some of its parameters only. State is shared, options are copied (`copy_options`)."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    mine = {id(master) for master in masters}
    other.param_groups = [
        {**group, "params": [param for param in group["params"] if id(param) in mine]}
        for group in optimizer.param_groups
    ]
    return other


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Bring a twin's options up to date: rates may change while an update is still running."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")})


# Tensors side by side in one file.


Key = tuple[int, str]
"""The number of a parameter, and which of its tensors: its own name in the optimizer's state, or `weight`."""


class FileRegion(NamedTuple):
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


class OffloadFile:
    """A file without a name that holds the tensors of one bucket: read and written as one, gone with the process."""

    def __init__(self, queue: FileQueue, folder: Path, tensors: Iterable[tuple[Key, torch.dtype, torch.Size]]) -> None:
        self.places: dict[Key, FileRegion] = {}
        size = 0
        for key, dtype, shape in tensors:
            place = FileRegion(dtype, shape, size)
            self.places[key] = place
            size += rounded(place.bytes)
        self.size = size
        self.file = TensorFile.scratch(queue, folder, max(size, 1))
        # When the last request is over that still knows the file: a number that is free again may be another's.
        weakref.finalize(self.file, os.close, self.file.descriptor)

    def put(self, key: Key, tensor: Tensor) -> FileTransfer:
        """Write one tensor."""
        return self.file.write_from(tensor, self.places[key].at)

    def read(self, room: Tensor) -> FileTransfer:
        """Fill a room of `size` bytes."""
        return self.file.read_into(room[: self.size], 0)

    def write(self, room: Tensor) -> FileTransfer:
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


# The tensors inside of a parameter's optimizer state, by name.


PART = "/"
"""Between the name of a state and of a tensor inside of it."""


def leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter's state that are no scalars, also those inside of a named tuple."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim > 0:
                yield key, value
        elif hasattr(value, "_fields"):
            parts = ((part, getattr(value, part)) for part in value._fields)
            yield from ((f"{key}{PART}{part}", each) for part, each in parts if isinstance(each, Tensor))


def mapped(value: Any, change: Callable[[Tensor], Tensor], constant: Callable[[Any], Any]) -> Any:
    """A state of the same form with each of its leaves changed; `constant` is for tables that it refers to."""
    if isinstance(value, Tensor):
        return change(value) if value.ndim > 0 else value
    if not hasattr(value, "_fields"):
        return value
    inside = {part: getattr(value, part) for part in value._fields}
    tensors = {part: change(each) for part, each in inside.items() if isinstance(each, Tensor)}
    tables = {part: constant(each) for part, each in inside.items() if hasattr(each, "_fields")}
    return value._replace(**tensors, **tables)
