"""Host memory that saving and loading use beyond the state itself, computed beforehand for the memory plan.

`save.py` and `load.py` use the thread counts of this file, so the buffers counted here are those that they allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from plait.checkpoint.pieces import copy_bytes
from plait.checkpoint.read import READ_BUFFER
from plait.checkpoint.tensorfile import BLOCK
from plait.distributed import is_sharded, to_local

WRITERS = 4
"""Writing threads of a rank, if it has as many cores: one waits for the disk while another computes digests."""
READERS = 8


class SavedTensor(NamedTuple):
    """The properties of a tensor that decide how much memory it takes to save and to load it."""

    bytes: float
    """Size of this rank's shard."""
    holders: int
    """Ranks that hold the same shard, of which one writes it."""
    on_device: bool = False
    contiguous: bool = True
    """Whether its bytes can be read straight into it, without a buffer."""


class CheckpointMemory(NamedTuple):
    """Bytes of host memory that saving and loading take."""

    written: float
    """The bytes that this rank writes."""
    copied: float
    """Size of the copy of these bytes that a save in the background makes; it is kept for the next save."""
    writing: float
    """Buffers for blocks on their way from a device to a file."""
    reading: float
    """Buffers for groups of blocks on their way from a file to a device, or to memory that is not contiguous."""


def thread_count(most: int, *, cores: int, ranks: int) -> int:
    """Return how many threads each rank uses, at most `most`, on a host with `cores` cores and `ranks` ranks."""
    return max(1, min(most, cores // ranks))


def saved_tensor(tensor: Tensor, ranks: int) -> SavedTensor:
    """Return the properties of a tensor that `ranks` ranks hold, each all of it or a shard."""
    local = to_local(tensor.detach())
    shards = 1
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        shards = prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return SavedTensor(local.nbytes, max(ranks // shards, 1), local.device.type != "cpu", local.is_contiguous())


def checkpoint_memory(tensors: Sequence[SavedTensor], *, cores: int, ranks: int, background: bool) -> CheckpointMemory:
    """Return the memory that one rank uses to save and load these tensors, on a host with `cores` cores.

    Ranks that hold the same shard are assumed to write equal parts of it, see `pieces.assign_writes`. The checkpoint is
    assumed to have the same sharding as this run. If it has another, slices are copied out of larger reads, and CPU
    tensors take a buffer (`reading`) too.
    """
    written = sum(tensor.bytes / tensor.holders for tensor in tensors)
    copied = (
        sum(copy_bytes(tensor.bytes, pinned=tensor.on_device) / tensor.holders for tensor in tensors)
        if background
        else 0
    )
    writers, readers = (thread_count(most, cores=cores, ranks=ranks) for most in (WRITERS, READERS))
    bounced = sum(tensor.on_device for tensor in tensors) if not background else 0
    stopped = [tensor.on_device for tensor in tensors if tensor.on_device or not tensor.contiguous]
    buffer = copy_bytes(READ_BUFFER, pinned=any(stopped))
    return CheckpointMemory(written, copied, BLOCK * min(writers, bounced), buffer * min(readers, len(stopped)))
