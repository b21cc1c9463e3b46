"""The ranks that share a sequence, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import WorldError
from plait.world import all_gather_flat, reduce_scatter_flat, wait_for


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks among which a sequence is cut, and where this one stands among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, where: DeviceMesh | dist.ProcessGroup) -> Line:
        """The line along a mesh of one axis, or of a process group."""
        if isinstance(where, DeviceMesh):
            if where.ndim != 1:
                raise WorldError(
                    f"a sequence is cut along one mesh axis, not along {where.mesh_dim_names or where.ndim}; "
                    'pass a slice, such as mesh["cp"]'
                )
            where = where.get_group()
        return cls(where, dist.get_rank(where), dist.get_world_size(where))


class Hop:
    """One message to the next rank of the line, and the one that comes from the rank before.

    Both are under way from the start; `wait` gives what came. On CUDA it does not hold up the host, only the
    work that is queued after it.
    """

    def __init__(self, line: Line, outgoing: Tensor) -> None:
        self._outgoing = outgoing  # must not be freed before it is sent
        self._incoming = torch.empty_like(outgoing)
        after, before = (line.rank + 1) % line.size, (line.rank - 1) % line.size
        self._works: Sequence[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=line.group, group_peer=after),
                dist.P2POp(dist.irecv, self._incoming, group=line.group, group_peer=before),
            ]
        )

    def wait(self) -> Tensor:
        """What the rank before has sent."""
        wait_for(self._works, "an exchange between parts of the sequence")
        return self._incoming


def gather_from_all(x: Tensor, line: Line) -> Tensor:
    """The tensors of all ranks, stacked in rank order; without gradients."""
    everyone = x.new_empty(line.size * x.numel())
    all_gather_flat(everyone, x.reshape(-1), group=line.group)
    return everyone.view(line.size, *x.shape)


def scatter_sum(x: Tensor, line: Line) -> Tensor:
    """The i-th part of the sum over all ranks, for rank i; `x` has one part for each rank. Without gradients."""
    mine = x.new_empty(x[0].numel())
    reduce_scatter_flat(mine, x.reshape(-1), group=line.group)
    return mine.view(x.shape[1:])


def pack(*tensors: Tensor) -> Tensor:
    """Tensors as one flat message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(*shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
