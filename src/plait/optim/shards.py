"""How a parameter is spread over ranks, for the optimizers that must see more than one shard.

[Note: what an optimizer may be given]
A parameter is a plain tensor, whole on every rank, or a DTensor cut into rows over one mesh axis, as
`fully_shard` does it: rank r has rows r·k to (r+1)·k with k = ⌈rows/ranks⌉, so the last ranks may have
fewer rows or none. Other mesh axes may only replicate. Maths happens on local tensors; only sums and
whole-matrix work travel, in one collective for all parameters of an axis.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose rows are whose: a tensor of shape `whole`, cut along its first dim over one mesh axis."""

    mesh: DeviceMesh
    axis: int
    whole: torch.Size

    @property
    def key(self) -> Hashable:
        """Equal for tensors that are spread over the same ranks."""
        return (self.mesh, self.axis)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the rows."""
        return self.mesh.get_group(self.axis)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.axis)

    def counts(self) -> list[int]:
        """How many rows each rank has."""
        ranks, rows = self.mesh.size(self.axis), self.whole[0]
        share = -(-rows // ranks)
        return [max(0, min(share, rows - rank * share)) for rank in range(ranks)]

    def numels(self) -> list[int]:
        """How many elements each rank has."""
        width = self.whole[1:].numel()
        return [count * width for count in self.counts()]

    def place(self, own: Tensor) -> Tensor:
        """A whole tensor of zeros, but for this rank's rows: summed over ranks, it is complete."""
        full = own.new_zeros((self.whole[0], *own.shape[1:]))
        self.take(full).copy_(own)
        return full

    def take(self, full: Tensor) -> Tensor:
        """The view of a whole tensor that holds this rank's rows."""
        counts, rank = self.counts(), self.rank
        return full.narrow(0, sum(counts[:rank]), counts[rank])


def rows_of(tensor: Tensor) -> Rows | None:
    """How a tensor is cut; None where this rank has it whole."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    cut = [
        axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    if not cut:
        return None
    if len(cut) > 1 or tensor.placements[cut[0]] != Shard(0):
        raise ModelError(
            f"a parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}; this optimizer "
            "works on parameters cut along their first dim over one mesh axis. Use AdamW for this layout."
        )
    return Rows(mesh, cut[0], tensor.shape)


def by_sharding(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], Rows | None]]:
    """The tensors in lists that are spread over the same ranks, each with the rows of its first tensor."""
    buckets: dict[Hashable, tuple[list[Tensor], Rows | None]] = {}
    for tensor in tensors:
        rows = rows_of(tensor)
        buckets.setdefault(rows and rows.key, ([], rows))[0].append(tensor)
    return list(buckets.values())


def sum_over_shards(tensors: Sequence[Tensor], rows: Sequence[Rows | None]) -> list[Tensor]:
    """Each tensor summed over the ranks its `rows` name, with one all-reduce for each mesh axis."""
    result = list(tensors)
    buckets: dict[Hashable, list[int]] = {}
    for index, where in enumerate(rows):
        if where is not None:
            buckets.setdefault(where.key, []).append(index)
    for indices in buckets.values():
        first = rows[indices[0]]
        assert first is not None
        flat = torch.cat([tensors[index].flatten() for index in indices])
        dist.all_reduce(flat, group=first.group)
        pieces = flat.split_with_sizes([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            result[index] = piece.view(tensors[index].shape)
    return result
