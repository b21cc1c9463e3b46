"""Full parameters for optimizers that cannot work on shards.

[Note: one owner per parameter] Many optimizers are not elementwise, but update each parameter independently of the
others. For these, each parameter is assigned to one of the ranks that shard it, its owner. The other ranks send their
shards of the parameter and of its gradient to the owner, which updates the full parameter as one process would, and
sends the shards back. The optimizer state is on the owner only, so states are distributed over ranks as at ZeRO stage
1. A parameter that is sharded over several mesh axes, or unevenly, is gathered by every rank that holds a shard, and
updated by all of them.

The full tensors stay allocated between steps, since the user's code may read them in the optimizer's groups. They have
the weights of the last update; within `gathered` they have the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plait.distributed import dtensor_like, to_local
from plait.errors import ModelError

# [Note: what an optimizer may be given]
# Optimizers over DTensors (LAMB, Adafactor, Muon) get plain tensors, replicated on every rank, or DTensors sharded by
# rows over one mesh axis, as by `fully_shard`: rank r has rows r·k to (r+1)·k with k = ⌈rows/ranks⌉, so the last ranks
# may have fewer rows or none. Over other mesh axes a parameter must be replicated. The optimizers compute on local
# tensors; they communicate only to sum over ranks, and for functions of full matrices, with one collective for all
# parameters that are sharded over the same axis.


@dataclass(frozen=True, slots=True)
class RowSharding:
    """How a tensor is sharded along its first dim over one mesh axis; `shape` is the global one."""

    mesh: DeviceMesh
    axis: int
    shape: torch.Size

    @property
    def key(self) -> Hashable:
        """A key that is equal for tensors that are sharded over the same ranks."""
        return (self.mesh, self.axis)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold the rows."""
        return self.mesh.get_group(self.axis)

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self.mesh.get_local_rank(self.axis)

    def counts(self) -> list[int]:
        """Return the number of rows of each rank."""
        ranks, rows = self.mesh.size(self.axis), self.shape[0]
        share = -(-rows // ranks)
        return [max(0, min(share, rows - rank * share)) for rank in range(ranks)]

    def numels(self) -> list[int]:
        """Return the number of elements of each rank."""
        width = self.shape[1:].numel()
        return [count * width for count in self.counts()]

    def zero_padded(self, local: Tensor) -> Tensor:
        """Return a full tensor with this rank's rows, and zeros elsewhere: summed over ranks, it is complete."""
        full = local.new_zeros((self.shape[0], *local.shape[1:]))
        self.local_rows(full).copy_(local)
        return full

    def local_rows(self, full: Tensor) -> Tensor:
        """Return the view of a full tensor that holds this rank's rows."""
        counts, rank = self.counts(), self.rank
        return full.narrow(0, sum(counts[:rank]), counts[rank])


def row_sharding(tensor: Tensor) -> RowSharding | None:
    """Return how a tensor is sharded; None if this rank has all of it.

    Raises `ModelError` unless it is sharded by rows over one mesh axis.
    """
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
            f"a parameter of shape {tuple(tensor.shape)} has the placements {tensor.placements}; this optimizer "
            "supports parameters sharded along their first dim over one mesh axis. Use AdamW for this layout."
        )
    return RowSharding(mesh, cut[0], tensor.shape)


def group_by_sharding(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], RowSharding | None]]:
    """Return the tensors in groups that are sharded over the same ranks, each with the sharding of its first tensor."""
    buckets: dict[Hashable, tuple[list[Tensor], RowSharding | None]] = {}
    for tensor in tensors:
        rows = row_sharding(tensor)
        buckets.setdefault(rows and rows.key, ([], rows))[0].append(tensor)
    return list(buckets.values())


def sum_over_shards(tensors: Sequence[Tensor], rows: Sequence[RowSharding | None]) -> list[Tensor]:
    """Return each tensor summed over the ranks of its sharding in `rows`, with one all-reduce per mesh axis."""
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


Work = Callable[[Tensor], Tensor]
"""A function from a full tensor to one of the same shape and dtype."""


def map_full(work: Work, tensors: Sequence[Tensor], rows: Sequence[RowSharding | None]) -> list[Tensor]:
    """Apply `work` to every full tensor; return this rank's rows of the results.

    For a replicated tensor every rank calls `work`. Each sharded tensor is assigned to one rank: an all-to-all sends it
    there in full, this rank calls `work`, and a second all-to-all returns the shards. So the work is distributed over
    the ranks, and each holds only the full tensors that are assigned to it.
    """
    results: dict[int, Tensor] = {}
    buckets: dict[Hashable, list[tuple[int, RowSharding]]] = {}
    for index, where in enumerate(rows):
        if where is None:
            results[index] = work(tensors[index])
        else:
            buckets.setdefault(where.key, []).append((index, where))
    for bucket in buckets.values():
        shards = [tensors[index] for index, _ in bucket]
        for (index, _), result in zip(bucket, _exchange(work, shards, [r for _, r in bucket]), strict=True):
            results[index] = result
    return [results[index] for index in range(len(tensors))]


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each cost, with about equal sums per rank: largest cost first, to the least loaded rank."""
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def _exchange(work: Work, shards: Sequence[Tensor], rows: Sequence[RowSharding]) -> list[Tensor]:
    group, rank = rows[0].group, rows[0].rank
    numels = [where.numels() for where in rows]
    ranks = len(numels[0])
    owners = assign_owners([_cost(where.shape) for where in rows], ranks)
    order = sorted(range(len(shards)), key=lambda index: owners[index])
    mine = [index for index in order if owners[index] == rank]

    # The flattened rows of all ranks, in the order of ranks, are the flattened full tensor: no padding or permutation.
    send = torch.cat([shards[index].flatten() for index in order])
    sent = [sum(numels[i][rank] for i in order if owners[i] == to) for to in range(ranks)]
    received = [sum(numels[i][source] for i in mine) for source in range(ranks)]
    received_flat = send.new_empty(sum(received))
    dist.all_to_all_single(received_flat, send, received, sent, group=group)

    blocks = list(received_flat.split_with_sizes([numels[i][source] for source in range(ranks) for i in mine]))
    for position, index in enumerate(mine):
        blocks_of_param = slice(position, None, len(mine))
        whole = torch.cat(blocks[blocks_of_param]).view(rows[index].shape)
        blocks[blocks_of_param] = work(whole).flatten().split_with_sizes(numels[index])
    back = torch.cat(blocks) if blocks else received_flat
    dist.all_to_all_single(send, back, sent, received, group=group)

    pieces = send.split_with_sizes([shards[index].numel() for index in order])
    results = {index: piece.view(shards[index].shape) for index, piece in zip(order, pieces, strict=True)}
    return [results[index] for index in range(len(shards))]


def _cost(shape: torch.Size) -> float:
    # The FLOPs of Newton–Schulz iteration, which multiplies by the smaller Gram matrix: elements × the shorter side.
    return float(shape.numel() * min(shape[0], shape[1:].numel()))


@dataclass(slots=True)
class _ShardedParam:
    """A parameter that is sharded along one dim over one mesh axis."""

    index: int
    dim: int
    owner: int = 0
    sizes: list[int] = field(default_factory=list)
    """The size of each rank's shard along `dim`."""

    def shape_on(self, rank: int, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.sizes[rank], *shape[self.dim + 1 :]))


@dataclass(slots=True)
class _OwnerBucket:
    """The parameters that are sharded over the same ranks, in the order of their owners."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cuts: list[_ShardedParam] = field(default_factory=list)


class OwnedParams:
    """The full parameters that an optimizer updates on this rank; see [Note: one owner per parameter]."""

    def __init__(self, tensors: Sequence[nn.Parameter]) -> None:
        """`tensors` are the parameters, in the same order on all ranks; some of them DTensors."""
        self._tensors = list(tensors)
        self.updated: list[nn.Parameter | None] = []
        """For each parameter the tensor that this rank's optimizer updates; None if another rank updates it."""
        self._replicated: list[int] = []
        buckets: dict[Hashable, _OwnerBucket] = {}
        for index, tensor in enumerate(tensors):
            self.updated.append(self._assign(index, tensor, buckets))
        self._buckets = list(buckets.values())
        for bucket in self._buckets:
            owners = assign_owners([tensors[cut.index].numel() for cut in bucket.cuts], bucket.ranks)
            for cut, owner in zip(bucket.cuts, owners, strict=True):
                cut.owner = owner
                if owner == bucket.rank:
                    self.updated[cut.index] = _empty_full(tensors[cut.index])
            bucket.cuts.sort(key=lambda cut: cut.owner)

    def _assign(self, index: int, tensor: nn.Parameter, buckets: dict[Hashable, _OwnerBucket]) -> nn.Parameter | None:
        """Return the optimizer's tensor of a parameter; None for one that will be assigned to an owner."""
        if not isinstance(tensor, DTensor):
            return tensor
        mesh, placements = tensor.device_mesh, tensor.placements
        axes = [
            axis for axis, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(axis) > 1
        ]
        if not axes:
            with torch.no_grad():
                return nn.Parameter(tensor.to_local())
        axis, placement = axes[0], placements[axes[0]]
        if len(axes) == 1 and type(placement) is Shard:
            ranks, rank = mesh.size(axis), mesh.get_local_rank(axis)
            length = tensor.shape[placement.dim]
            share = -(-length // ranks)
            sizes = [max(0, min(share, length - position * share)) for position in range(ranks)]
            bucket = buckets.setdefault((mesh, axis, tensor.dtype), _OwnerBucket(mesh.get_group(axis), rank, ranks))
            bucket.cuts.append(_ShardedParam(index, placement.dim, sizes=sizes))
            return None
        self._replicated.append(index)
        return _empty_full(tensor)

    @contextmanager
    def gathered(self, *, gradients: bool = False) -> Iterator[None]:
        """Within the block, owners have the current full weights and, with `gradients`, the step's gradients.

        At its end the owners send the shards of the weights back, and gradients are freed. Every rank must enter it.
        """
        with torch.no_grad():
            self._gather(gradients=gradients)
        yield
        with torch.no_grad():
            self._scatter()
        for tensor in self.updated:
            if tensor is not None:
                tensor.grad = None

    def _gather(self, *, gradients: bool) -> None:
        for bucket in self._buckets:
            full_params = self._to_owners(bucket, [self._local(cut.index) for cut in bucket.cuts])
            for index, full in full_params.items():
                self._updated(index).copy_(full)
            if gradients:
                for index, full in self._to_owners(bucket, [self._grad(cut.index) for cut in bucket.cuts]).items():
                    self._updated(index).grad = full
        for index in self._replicated:
            self._updated(index).copy_(_gathered(self._tensors[index]))
            if gradients:
                full = _gathered(dtensor_like(self._grad(index), self._tensors[index]))
                self._updated(index).grad = full
        if gradients:
            for tensor, updated in zip(self._tensors, self.updated, strict=True):
                if updated is not None and updated.grad is None and tensor.grad is not None:
                    updated.grad = to_local(tensor.grad)

    def _scatter(self) -> None:
        for bucket in self._buckets:
            self._from_owners(bucket)
        for index in self._replicated:
            tensor = self._tensors[index]
            assert isinstance(tensor, DTensor)
            mesh = tensor.device_mesh
            whole = DTensor.from_local(self._updated(index).detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            self._local(index).copy_(whole.redistribute(placements=tensor.placements).to_local())

    def _updated(self, index: int) -> nn.Parameter:
        param = self.updated[index]
        assert param is not None
        return param

    def _local(self, index: int) -> Tensor:
        return to_local(self._tensors[index])

    def _grad(self, index: int) -> Tensor:
        tensor = self._tensors[index]
        assert tensor.grad is not None  # `gather_gradients` sets each one
        return to_local(tensor.grad)

    def _to_owners(self, bucket: _OwnerBucket, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send all ranks' shards to the owners; return the full tensors that this rank owns, by parameter index."""
        cuts, rank, ranks = bucket.cuts, bucket.rank, bucket.ranks
        mine = [cut for cut in cuts if cut.owner == rank]
        send = torch.cat([shard.reshape(-1) for shard in shards])
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

    def _from_owners(self, bucket: _OwnerBucket) -> None:
        cuts, rank, ranks = bucket.cuts, bucket.rank, bucket.ranks
        mine = [cut for cut in cuts if cut.owner == rank]
        split = {cut.index: self._updated(cut.index).detach().split_with_sizes(cut.sizes, dim=cut.dim) for cut in mine}
        back = [split[cut.index][to].reshape(-1) for to in range(ranks) for cut in mine]
        like = self._local(cuts[0].index)
        send = torch.cat(back) if back else like.new_empty(0)
        sent = [sum(self._numel(cut, to) for cut in mine) for to in range(ranks)]
        received = self._numels(bucket)[rank]
        arrived = send.new_empty(sum(received))
        dist.all_to_all_single(arrived, send, received, sent, group=bucket.group)
        for cut, block in zip(cuts, arrived.split_with_sizes([self._numel(cut, rank) for cut in cuts]), strict=True):
            shard = self._local(cut.index)
            shard.copy_(block.view(shard.shape))

    def _numel(self, cut: _ShardedParam, rank: int) -> int:
        return cut.shape_on(rank, self._tensors[cut.index].shape).numel()

    def _numels(self, bucket: _OwnerBucket) -> list[list[int]]:
        """Return, as `[rank][owner]`, how many elements of the owner's parameters the rank's shards have."""
        return [
            [sum(self._numel(cut, rank) for cut in bucket.cuts if cut.owner == to) for to in range(bucket.ranks)]
            for rank in range(bucket.ranks)
        ]


def _empty_full(tensor: nn.Parameter) -> nn.Parameter:
    local = to_local(tensor.detach())
    return nn.Parameter(torch.zeros(tensor.shape, dtype=local.dtype, device=local.device))


def _gathered(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
