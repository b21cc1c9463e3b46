"""Wholes that the ranks share out among them, so that no checkpoint needs one rank to hold everything.

[Note: states by way of wholes]
Other libraries lay out their states as they like: flat buffers, chunks, parts that begin in the middle of a row. A
checkpoint wants names and whole shapes. So each tensor is made whole, one at a time, and each rank keeps the same
part of it that `fully_shard` would give it. Reading a checkpoint goes the same way back.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def share_of(whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of a tensor that every rank has, as a DTensor of its own memory; alone, a copy of it."""
    if mesh is None or whole.ndim == 0:
        return whole.detach().clone()
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
    return as_share(cut.to_local().clone(), whole, mesh)


def as_share(part: Tensor, whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A part as `share_of` cuts it, as the whole that it belongs to; `whole` need not have values."""
    if mesh is None or whole.ndim == 0:
        return part
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=_strides(whole))


def _strides(whole: Tensor) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(whole.shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))
