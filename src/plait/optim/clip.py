"""The global gradient norm from local shards, and clipping by value.

Clipping by norm has no function here: the update multiplies the gradients by its factor, the loss scale and the
correction of the loss at once (`engine/update.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.torch_internals import foreach_clamp_max_, foreach_clamp_min_, foreach_norm


def grad_norm(
    tensors: list[Tensor], group: dist.ProcessGroup | None = None, weights: Sequence[float] | None = None
) -> float:
    """Return the 2-norm of all gradients together, the same number on every rank.

    With a `group`, `tensors` are this rank's shards of the gradients (it may have none); without one, they are full
    gradients. Each squared norm is multiplied by its weight in `weights`: a half, for example, if two ranks of the
    group hold the same shard. Norms are accumulated in fp32 or wider, so that 16-bit gradients do not overflow.
    """
    return norm_of(tensor_norms(tensors), group, weights)


def norm_of(
    norms: Sequence[Tensor], group: dist.ProcessGroup | None = None, weights: Sequence[float] | None = None
) -> float:
    """Return the 2-norm of all gradients together, as `grad_norm` does, from the norm of each shard."""
    if group is None and weights is None and all(norm.device.type == "cpu" for norm in norms):
        # Without further torch operations: for a small model they would cost more than the norms themselves.
        return math.sqrt(sum(norm.item() ** 2 for norm in norms))
    if not norms:
        return float(whole_norm(torch.zeros(0), group))
    stacked = torch.stack(list(norms))
    counted = None if weights is None else torch.tensor(weights, dtype=torch.float64, device=stacked.device)
    return float(whole_norm(stacked, group, counted))


def tensor_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return each tensor's norm, in fp32 or wider; one call per dtype, since `foreach` needs equal dtypes."""
    formats = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(formats) == 1:  # nearly always
        return foreach_norm(tensors, 2, dtype=_wide(*formats))
    by_index: dict[int, Tensor] = {}
    for dtype in formats:
        chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        norms = foreach_norm([tensors[index] for index in chosen], 2, dtype=_wide(dtype))
        by_index.update(zip(chosen, norms, strict=True))
    return [by_index[index] for index in range(len(tensors))]


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to sum the squares of a dtype in; None if it is the same."""
    return None if dtype in (torch.float32, torch.float64) else torch.float32


def part_norms(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of each shard, as one tensor on the device; does not wait for the device."""
    norms = tensor_norms(tensors)
    return torch.stack(list(norms)) if norms else torch.zeros(0, device=device)


def whole_norm(norms: Tensor, group: dist.ProcessGroup | None = None, weights: Tensor | None = None) -> Tensor:
    """Return the norm of all shards of all ranks of `group`, as a tensor; does not wait for the device.

    `weights`, fp64 on the device, multiply the squared norms.
    """
    squared = norms.double().square()
    squares = (squared if weights is None else squared * weights).sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


@torch.no_grad()
def clip_by_value(tensors: list[Tensor], limit: float) -> None:
    """Clamp every gradient element in place to [-limit, limit]."""
    if tensors:
        foreach_clamp_min_(tensors, -limit)
        foreach_clamp_max_(tensors, limit)
