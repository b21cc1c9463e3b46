"""What `fully_shard` gathers and scatters over gloo: each rank sends every other one its piece, and nothing else.

[Note: gloo's own gather and scatter]
gloo copies what it is given, and passes it around a ring. For 14 MB and two ranks, a scatter takes almost three times
the processor time of sending one half and adding the other's, and a gather twice that of sending one's own half. So
both are put together here from messages between two ranks, which go from where a piece is to where it belongs.
Memory is held on to where it may be: taken anew in every step, each page of it would have to be cleared by the system
first, which costs more than a copy.

A plan, in which nobody is there to exchange with, has the same memory, and counts the collective that was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from plait.world import all_gather_flat, reduce_scatter_flat, wait_for

_FAKE = "fake"
"""The backend of ranks that are not there."""


def exchange_directly(modules: Iterable[FSDPModule], mesh: DeviceMesh, *, keep: bool) -> None:
    """Have sharded modules exchange their pieces directly, where the ranks talk by way of gloo.

    `keep`: hold on to the memory that gathers need, too, as much as the parameters take.
    """
    if mesh.device_type != "cpu" or dist.get_backend(mesh.get_group(mesh.ndim - 1)) not in ("gloo", _FAKE):
        return
    scatter = _Scatter()  # modules scatter one after the other, in the same memory
    for module in modules:
        module.set_custom_all_gather(_Gather(keep=keep))  # type: ignore[arg-type]  # its base has no public name
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


class _Room:
    """Memory to be used again where the size is the same."""

    def __init__(self) -> None:
        self._spare: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for so many numbers, whatever they are."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == size and spare.dtype == dtype:
            return spare
        return torch.empty(size, dtype=dtype, device=device)

    def leave(self, space: Tensor) -> None:
        """Nobody will look at it any more when the next is taken."""
        self._spare = space


class _Gather:
    """The all-gather of one group of parameters, which are copied out of it before the next one begins."""

    def __init__(self, *, keep: bool) -> None:
        self._keep, self._room = keep, _Room()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._room.take(size[0], dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if dist.get_backend(group) == _FAKE:
            all_gather_flat(output_tensor, input_tensor, group=group)
        else:
            pieces = output_tensor.chunk(group.size())
            own = pieces[group.rank()]
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            peers = _peers(group)
            what = f"all_gather of {own.numel()}"
            _swap(peers, [own] * len(peers), [pieces[peer] for peer in peers], group, what)
        if self._keep:
            self._room.leave(output_tensor)


class _Scatter:
    """The reduce-scatter of a group of gradients: what it adds up is void afterwards, the sum stays."""

    def __init__(self) -> None:
        self._room, self._inbox = _Room(), _Room()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._room.take(size[0], dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "ranks only sum, as `shard` says"
        pieces, peers = input_tensor.chunk(group.size()), _peers(group)
        inbox = self._inbox.take(len(peers) * output_tensor.numel(), output_tensor.dtype, output_tensor.device)
        if dist.get_backend(group) == _FAKE:
            reduce_scatter_flat(output_tensor, input_tensor, op=op, group=group)
        else:
            first, *others = places = inbox.chunk(len(peers))
            what = f"reduce_scatter of {input_tensor.numel()}"
            _swap(peers, [pieces[peer] for peer in peers], places, group, what)
            torch.add(pieces[group.rank()], first, out=output_tensor)
            for place in others:
                output_tensor += place
        self._inbox.leave(inbox)
        self._room.leave(input_tensor)


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, by their numbers in it."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


def _swap(
    peers: Sequence[int], outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup, what: str
) -> None:
    """Send each peer something, and put what comes from it into its place; `what` is done so."""
    works = [dist.irecv(place, group=group, group_src=peer) for peer, place in zip(peers, incoming, strict=True)]
    works += [dist.isend(given, group=group, group_dst=peer) for peer, given in zip(peers, outgoing, strict=True)]
    wait_for(works, what)
