"""Optimizer offload: which parameters are updated together, and files that hold their state (NVMe tier).

A *span* lists the indices of parameters that are updated together, and their *home*: where their optimizer state is
kept. A *bucket* is a span with its tensors and its optimizer. The *target* of an update is this rank's shard of a
parameter as the model computes with it; the *master* is its weight, often fp32, that the optimizer updates.
"""

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
    """Parameters that are updated together, and where their state is kept."""

    indices: tuple[int, ...]
    home: Home


def plan_spans(
    numels: Sequence[int], order: Sequence[int], *, limit: int, shares: Sequence[tuple[Home, float]]
) -> list[BucketSpan]:
    """Group parameters, in this order, into spans of at most `limit` elements; a larger parameter is a span alone.

    `shares` are the homes, the fastest first, each with its share of all elements; the last home gets the rest. The
    first parameters in the order go to the fastest home: the next forward pass needs them first, and they are updated
    at once, while the CPU still updates the others.
    """
    limits = [end * sum(numels) for end in accumulate(share for _, share in shares[:-1])]
    spans: list[BucketSpan] = []
    pending: list[int] = []
    size = passed = 0
    previous = shares[-1][0]
    for index in order:
        numel = numels[index]
        passed += numel
        home = shares[next((tier for tier, end in enumerate(limits) if passed <= end), -1)][0]
        if pending and (size + numel > limit or home != previous):
            spans.append(BucketSpan(tuple(pending), previous))
            pending, size = [], 0
        previous = home
        pending.append(index)
        size += numel
    if pending:
        spans.append(BucketSpan(tuple(pending), previous))
    return spans


@dataclass(slots=True)
class Bucket:
    """A span with its tensors and its optimizer."""

    span: BucketSpan
    targets: list[Tensor]
    """This rank's shard of each parameter, as the model computes with it."""
    masters: list[nn.Parameter]
    """The master weight of each parameter, which the optimizer updates."""
    sinks: list[Sink | None]
    """For each parameter whose target has no memory: a function that is called with its new weights; else None."""
    optimizer: Optimizer | None = None
    """An `optimizer_for` the masters."""
    update: Future[None] | None = None
    """The update in progress."""
    published: Any = None
    """The event after the copies of the last update's weights to the device."""
    home: Any = None
    """The event after the copies of state that the device updated back to host memory."""

    @property
    def numel(self) -> int:
        """The number of elements of all its parameters on this rank."""
        return sum(target.numel() for target in self.targets)

    def items(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Return (index, master, target) of each parameter."""
        return zip(self.span.indices, self.masters, self.targets, strict=True)


def optimizer_for(optimizer: Optimizer, masters: Sequence[Tensor]) -> Optimizer:
    """Return the same optimizer for some of its parameters.

    Its state is that of `optimizer`. Its hyperparameters are copies; `copy_options` updates them.
    """
    partial = object.__new__(type(optimizer))
    partial.__dict__.update(optimizer.__dict__)
    kept = {id(master) for master in masters}
    partial.param_groups = [
        {**group, "params": [param for param in group["params"] if id(param) in kept]}
        for group in optimizer.param_groups
    ]
    return partial


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Copy the hyperparameters of an optimizer to its `optimizer_for`.

    They are not shared, because a learning rate may change while an update is still running.
    """
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")})


# Tensors in one file.


Key = tuple[int, str]
"""The number of a parameter, and the name of one of its tensors: as in the optimizer's state, or `weight`."""


class FileRegion(NamedTuple):
    """Where a tensor is in its file."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of `buffer`, which has the contents of the whole file."""
        return buffer[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


class OffloadFile:
    """A file with the tensors of one bucket, read and written in one request; unlinked, so it ends with the process."""

    def __init__(self, queue: FileQueue, folder: Path, tensors: Iterable[tuple[Key, torch.dtype, torch.Size]]) -> None:
        self.regions: dict[Key, FileRegion] = {}
        size = 0
        for key, dtype, shape in tensors:
            region = FileRegion(dtype, shape, size)
            self.regions[key] = region
            size += rounded(region.bytes)
        self.size = size
        self.file = TensorFile.scratch(queue, folder, max(size, 1))
        # Closed when the last request that uses it is over: a closed descriptor's number may be given to another file.
        weakref.finalize(self.file, os.close, self.file.descriptor)

    def put(self, key: Key, tensor: Tensor) -> FileTransfer:
        """Begin to write one tensor; return the transfer."""
        return self.file.write_from(tensor, self.regions[key].offset)

    def read(self, buffer: Tensor) -> FileTransfer:
        """Begin to read the file into a buffer of at least `size` bytes; return the transfer."""
        return self.file.read_into(buffer[: self.size], 0)

    def write(self, buffer: Tensor) -> FileTransfer:
        """Begin to write the first `size` bytes of a buffer to the file; return the transfer."""
        return self.file.write_from(buffer[: self.size], 0)

    def sync(self) -> None:
        """Flush what was written into `mapped` tensors to the file: direct I/O (`read`) bypasses the page cache."""
        os.fdatasync(self.file.descriptor)

    def views(self, buffer: Tensor) -> dict[Key, Tensor]:
        """Return the tensors as views of a buffer with the contents of the file."""
        return {key: region.view(buffer) for key, region in self.regions.items()}

    def mapped(self) -> Mapping[Key, Tensor]:
        """Return the tensors as memory-mapped views of the file.

        For checkpoints, which read everything once, and to fill the tensors (then call `sync`). Drop the views before
        the next `read`.
        """
        if self.size == 0:
            return self.views(torch.empty(0, dtype=torch.uint8))
        memory = mmap.mmap(self.file.descriptor, self.size)
        return self.views(torch.frombuffer(memory, dtype=torch.uint8))


# The tensors of a parameter's optimizer state, by name.


STATE_SEPARATOR = "/"
"""Separates the name of a state that is a named tuple from the name of a tensor inside it."""


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a parameter's state, also inside named tuples; scalar states are left out."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim > 0:
                yield key, value
        elif hasattr(value, "_fields"):
            for name in value._fields:
                if isinstance(tensor := getattr(value, name), Tensor):
                    yield f"{key}{STATE_SEPARATOR}{name}", tensor


def map_state(value: Any, change: Callable[[Tensor], Tensor], constant: Callable[[Any], Any]) -> Any:
    """Return a state with `change` applied to its tensors.

    In a named tuple, `constant` is applied to fields that are named tuples themselves: tables that do not change.
    """
    if isinstance(value, Tensor):
        return change(value) if value.ndim > 0 else value
    if not hasattr(value, "_fields"):
        return value
    fields = {name: getattr(value, name) for name in value._fields}
    tensors = {name: change(field) for name, field in fields.items() if isinstance(field, Tensor)}
    tables = {name: constant(field) for name, field in fields.items() if hasattr(field, "_fields")}
    return value._replace(**tensors, **tables)
