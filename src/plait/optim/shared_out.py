"""Whole parameters, each on one of the ranks that hold its parts, for optimizers that know nothing of ranks.

[Note: one owner a parameter] An optimizer that treats parameters one by one does the same for each of them whatever
others there are. So the parameters are shared out: the parts of one, and of its gradient, go to the rank that owns it,
which updates it as one process would, and sends the parts back. What the optimizer keeps for it is on that rank alone,
so a rank has its share of the states, as at ZeRO stage 1. Where a parameter is cut over several axes of the mesh, or
unevenly, every rank that holds a part gathers all of it, and does the same.

The whole tensors stay allocated between steps: what holds the optimizer may look at them. They have the weights of
the last update; `in_place` brings those of now.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from plait.optim.exchange import share_out
from plait.world import local_part, same_kind


@dataclass(slots=True)
class _Cut:
    """A parameter that is cut along one dimension over one axis of the mesh."""

    index: int
    dim: int
    owner: int = 0
    sizes: list[int] = field(default_factory=list)
    """Of each rank's part along `dim`."""

    def shape_on(self, rank: int, whole: torch.Size) -> torch.Size:
        return torch.Size((*whole[: self.dim], self.sizes[rank], *whole[self.dim + 1 :]))


@dataclass(slots=True)
class _Bucket:
    """The parameters whose parts the same ranks hold, in the order of their owners."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cuts: list[_Cut] = field(default_factory=list)


class SharedOut:
    """The parameters that an optimizer updates on this rank, as plain tensors; see [Note: one owner a parameter]."""

    def __init__(self, tensors: Sequence[nn.Parameter]) -> None:
        """`tensors` are those of all ranks, in the same order on each; some of them DTensors."""
        self._tensors = list(tensors)
        self.updated: list[nn.Parameter | None] = []
        """For each of them what the optimizer gets; None where another rank updates it."""
        self._everywhere: list[int] = []
        buckets: dict[Hashable, _Bucket] = {}
        for index, tensor in enumerate(tensors):
            self.updated.append(self._place(index, tensor, buckets))
        self._buckets = list(buckets.values())
        for bucket in self._buckets:
            owners = share_out([tensors[cut.index].numel() for cut in bucket.cuts], bucket.ranks)
            for cut, owner in zip(bucket.cuts, owners, strict=True):
                cut.owner = owner
                if owner == bucket.rank:
                    self.updated[cut.index] = _whole_room(tensors[cut.index])
            bucket.cuts.sort(key=lambda cut: cut.owner)

    def _place(self, index: int, tensor: nn.Parameter, buckets: dict[Hashable, _Bucket]) -> nn.Parameter | None:
        """Say where a parameter is whole; None where that is yet to be shared out."""
        if not isinstance(tensor, DTensor):
            return tensor
        mesh, placements = tensor.device_mesh, tensor.placements
        axes = [axis for axis, each in enumerate(placements) if not each.is_replicate() and mesh.size(axis) > 1]
        if not axes:
            with torch.no_grad():
                return nn.Parameter(tensor.to_local())
        axis, placement = axes[0], placements[axes[0]]
        if len(axes) == 1 and type(placement) is Shard:
            ranks, rank = mesh.size(axis), mesh.get_local_rank(axis)
            length = tensor.shape[placement.dim]
            share = -(-length // ranks)
            sizes = [max(0, min(share, length - each * share)) for each in range(ranks)]
            bucket = buckets.setdefault((mesh, axis, tensor.dtype), _Bucket(mesh.get_group(axis), rank, ranks))
            bucket.cuts.append(_Cut(index, placement.dim, sizes=sizes))
            return None
        self._everywhere.append(index)
        return _whole_room(tensor)

    @contextmanager
    def in_place(self, *, gradients: bool = False) -> Iterator[None]:
        """Bring the weights, and the step's gradients, to where they are updated; the weights go back at the end.

        Every rank must call it.
        """
        with torch.no_grad():
            self._collect(gradients=gradients)
        yield
        with torch.no_grad():
            self._give_back()
        for tensor in self.updated:
            if tensor is not None:
                tensor.grad = None

    def _collect(self, *, gradients: bool) -> None:
        for bucket in self._buckets:
            wholes = self._to_owners(bucket, [self._part(cut.index) for cut in bucket.cuts])
            for index, whole in wholes.items():
                self._updated(index).copy_(whole)
            if gradients:
                for index, whole in self._to_owners(bucket, [self._grad(cut.index) for cut in bucket.cuts]).items():
                    self._updated(index).grad = whole
        for index in self._everywhere:
            self._updated(index).copy_(_gathered(self._tensors[index]))
            if gradients:
                whole = _gathered(same_kind(self._grad(index), self._tensors[index]))
                self._updated(index).grad = whole
        if gradients:
            for tensor, updated in zip(self._tensors, self.updated, strict=True):
                if updated is not None and updated.grad is None and tensor.grad is not None:
                    updated.grad = local_part(tensor.grad)

    def _give_back(self) -> None:
        for bucket in self._buckets:
            self._from_owners(bucket)
        for index in self._everywhere:
            tensor = self._tensors[index]
            assert isinstance(tensor, DTensor)
            mesh = tensor.device_mesh
            whole = DTensor.from_local(self._updated(index).detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            self._part(index).copy_(whole.redistribute(placements=tensor.placements).to_local())

    def _updated(self, index: int) -> nn.Parameter:
        found = self.updated[index]
        assert found is not None
        return found

    def _part(self, index: int) -> Tensor:
        return local_part(self._tensors[index])

    def _grad(self, index: int) -> Tensor:
        tensor = self._tensors[index]
        assert tensor.grad is not None  # the views give each one
        return local_part(tensor.grad)

    def _to_owners(self, bucket: _Bucket, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """The whole tensors that this rank owns, of everybody's parts; by the index of the parameter."""
        cuts, rank, ranks = bucket.cuts, bucket.rank, bucket.ranks
        mine = [cut for cut in cuts if cut.owner == rank]
        send = torch.cat([part.reshape(-1) for part in parts])
        sent = self._numels(bucket)[rank]
        received = [sum(self._numel(cut, source) for cut in mine) for source in range(ranks)]
        arrived = send.new_empty(sum(received))
        dist.all_to_all_single(arrived, send, received, sent, group=bucket.group)
        blocks = iter(arrived.split_with_sizes([self._numel(cut, source) for source in range(ranks) for cut in mine]))
        pieces: dict[int, list[Tensor]] = {cut.index: [] for cut in mine}
        for source in range(ranks):
            for cut in mine:
                shape = cut.shape_on(source, self._tensors[cut.index].shape)
                pieces[cut.index].append(next(blocks).view(shape))
        return {cut.index: torch.cat(pieces[cut.index], dim=cut.dim) for cut in mine}

    def _from_owners(self, bucket: _Bucket) -> None:
        cuts, rank, ranks = bucket.cuts, bucket.rank, bucket.ranks
        mine = [cut for cut in cuts if cut.owner == rank]
        split = {cut.index: self._updated(cut.index).detach().split_with_sizes(cut.sizes, dim=cut.dim) for cut in mine}
        back = [split[cut.index][to].reshape(-1) for to in range(ranks) for cut in mine]
        like = self._part(cuts[0].index)
        send = torch.cat(back) if back else like.new_empty(0)
        sent = [sum(self._numel(cut, to) for cut in mine) for to in range(ranks)]
        received = self._numels(bucket)[rank]
        arrived = send.new_empty(sum(received))
        dist.all_to_all_single(arrived, send, received, sent, group=bucket.group)
        for cut, block in zip(cuts, arrived.split_with_sizes([self._numel(cut, rank) for cut in cuts]), strict=True):
            part = self._part(cut.index)
            part.copy_(block.view(part.shape))

    def _numel(self, cut: _Cut, rank: int) -> int:
        return cut.shape_on(rank, self._tensors[cut.index].shape).numel()

    def _numels(self, bucket: _Bucket) -> list[list[int]]:
        """What each rank has of the parameters of each owner."""
        return [
            [sum(self._numel(cut, rank) for cut in bucket.cuts if cut.owner == to) for to in range(bucket.ranks)]
            for rank in range(bucket.ranks)
        ]


def _whole_room(tensor: nn.Parameter) -> nn.Parameter:
    local = local_part(tensor.detach())
    return nn.Parameter(torch.zeros(tensor.shape, dtype=local.dtype, device=local.device))


def _gathered(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
