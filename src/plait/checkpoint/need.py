"""What a rank's checkpoints take of its host's memory beside the state itself, known before there is one.

Writing and reading take their numbers of threads from here, and the rooms that are counted are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from plait.checkpoint.pieces import copy_bytes
from plait.checkpoint.read import ROOM
from plait.checkpoint.tensorfile import BLOCK
from plait.distributed import is_sharded, local_part

WRITERS = 4
"""Threads of a rank, where there are cores for them: one waits for the disk while another computes digests."""
READERS = 8


class Kept(NamedTuple):
    """What a checkpoint holds of one tensor, as far as it decides how much memory that takes."""

    bytes: float
    """Of this rank's part."""
    holders: int
    """Ranks that hold the same part, of which one writes it."""
    on_device: bool = False
    in_a_row: bool = True
    """Whether its bytes can be read to where they belong without a stop in between."""


class Need(NamedTuple):
    """Bytes."""

    written: float
    """What this rank writes."""
    copied: float
    """For a copy of that, which a save in the background makes and keeps."""
    writing: float
    """For blocks on their way from a device to a file."""
    reading: float
    """For groups of blocks on their way from a file to a device, or to memory that is not in one row."""


def workers(most: int, *, cores: int, ranks: int) -> int:
    """How many threads a rank has for it, on a host with so many cores and ranks."""
    return max(1, min(most, cores // ranks))


def kept(tensor: Tensor, ranks: int) -> Kept:
    """What a checkpoint of `ranks` ranks that all have this tensor, or a part of it, holds of it."""
    local = local_part(tensor.detach())
    shards = 1
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        shards = prod(mesh.size(dim) for dim, place in enumerate(tensor.placements) if not place.is_replicate())
    return Kept(local.nbytes, max(ranks // shards, 1), local.device.type != "cpu", local.is_contiguous())


def need(tensors: Sequence[Kept], *, cores: int, ranks: int, background: bool) -> Need:
    """What checkpoints of these tensors take, on a host with so many cores and ranks.

    Of what several ranks hold each writes about as much as any other, see `pieces.share_out`. What is read was written
    by ranks that held the same parts: other parts have to be cut out, which takes `reading` on any device.
    """
    written = sum(each.bytes / each.holders for each in tensors)
    copied = sum(copy_bytes(each.bytes, pinned=each.on_device) / each.holders for each in tensors) if background else 0
    writers, readers = (workers(most, cores=cores, ranks=ranks) for most in (WRITERS, READERS))
    bounced = sum(each.on_device for each in tensors) if not background else 0
    stopped = [each.on_device for each in tensors if each.on_device or not each.in_a_row]
    room = copy_bytes(ROOM, pinned=any(stopped))
    return Need(written, copied, BLOCK * min(writers, bounced), room * min(readers, len(stopped)))
