"""Optimizer offload: which parameters are updated together, and files that hold their state (NVMe tier)."""

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
    """Group the parameters, taken in this order, into spans of at most `limit` elements, or one parameter with more.

    Each home gets its share of all elements, the fastest first: the next forward pass needs those first, and they are
    ready at once, while the CPU still updates the others. The last home takes the rest.
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
    """The master weights: what the optimizer updates in their place."""
    sinks: list[Sink | None]
    """What receives the new weights of a parameter, where its target has no memory."""
    optimizer: Optimizer | None = None
    """The optimizer, as if these were its only parameters."""
    update: Future[None] | None = None
    """The update in progress."""
    published: Any = None
    """The event after the last update's copies to the device."""
    home: Any = None
    """The event after which what the device updated is in host memory again."""

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(target.numel() for target in self.targets)

    def items(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """(index, master, target) of each parameter."""
        return zip(self.span.indices, self.masters, self.targets, strict=True)


def optimizer_for(optimizer: Optimizer, masters: Sequence[Tensor]) -> Optimizer:
    """The same optimizer for some of its parameters. State is shared, hyperparameters are copied (`copy_options`)."""
    partial = object.__new__(type(optimizer))
    partial.__dict__.update(optimizer.__dict__)
    kept = {id(master) for master in masters}
    partial.param_groups = [
        {**group, "params": [param for param in group["params"] if id(param) in kept]}
        for group in optimizer.param_groups
    ]
    return partial


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Copy hyperparameters to an `optimizer_for`: learning rates may change while an update is still running."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")})


# Tensors in one file.


Key = tuple[int, str]
"""The number of a parameter, and which of its tensors: a name in the optimizer's state, or `weight`."""


class FileRegion(NamedTuple):
    """Where a tensor is in its file."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in a copy of the whole file."""
        return buffer[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


class OffloadFile:
    """An unlinked file with the tensors of one bucket: read and written as one, deleted with the process."""

    def __init__(self, queue: FileQueue, folder: Path, tensors: Iterable[tuple[Key, torch.dtype, torch.Size]]) -> None:
        self.regions: dict[Key, FileRegion] = {}
        size = 0
        for key, dtype, shape in tensors:
            region = FileRegion(dtype, shape, size)
            self.regions[key] = region
            size += rounded(region.bytes)
        self.size = size
        self.file = TensorFile.scratch(queue, folder, max(size, 1))
        # Closed when the last request that uses it is over: a descriptor that is free again may be another file's.
        weakref.finalize(self.file, os.close, self.file.descriptor)

    def put(self, key: Key, tensor: Tensor) -> FileTransfer:
        """Write one tensor."""
        return self.file.write_from(tensor, self.regions[key].offset)

    def read(self, buffer: Tensor) -> FileTransfer:
        """Read the file into a buffer of `size` bytes."""
        return self.file.read_into(buffer[: self.size], 0)

    def write(self, buffer: Tensor) -> FileTransfer:
        """Write a buffer of `size` bytes to the file."""
        return self.file.write_from(buffer[: self.size], 0)

    def sync(self) -> None:
        """Flush what was written into `mapped` tensors: direct I/O does not see the page cache."""
        os.fdatasync(self.file.descriptor)

    def views(self, buffer: Tensor) -> dict[Key, Tensor]:
        """The tensors in a buffer."""
        return {key: region.view(buffer) for key, region in self.regions.items()}

    def mapped(self) -> Mapping[Key, Tensor]:
        """The tensors as memory of the file itself: a page is read when it is touched, and written when it changes.

        For checkpoints, which read everything once. Drop them before the next `read`.
        """
        if self.size == 0:
            return self.views(torch.empty(0, dtype=torch.uint8))
        memory = mmap.mmap(self.file.descriptor, self.size)
        return self.views(torch.frombuffer(memory, dtype=torch.uint8))


# The tensors of a parameter's optimizer state, by name.


STATE_SEPARATOR = "/"
"""Between the name of a state and of a tensor inside of it, where it is a named tuple."""


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter's state that are not scalars, also those inside of a named tuple."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim > 0:
                yield key, value
        elif hasattr(value, "_fields"):
            for name in value._fields:
                if isinstance(tensor := getattr(value, name), Tensor):
                    yield f"{key}{STATE_SEPARATOR}{name}", tensor


def map_state(value: Any, change: Callable[[Tensor], Tensor], constant: Callable[[Any], Any]) -> Any:
    """The state with `change` applied to each of its tensors, and `constant` to the tables that it refers to."""
    if isinstance(value, Tensor):
        return change(value) if value.ndim > 0 else value
    if not hasattr(value, "_fields"):
        return value
    fields = {name: getattr(value, name) for name in value._fields}
    tensors = {name: change(field) for name, field in fields.items() if isinstance(field, Tensor)}
    tables = {name: constant(field) for name, field in fields.items() if hasattr(field, "_fields")}
    return value._replace(**tensors, **tables)
