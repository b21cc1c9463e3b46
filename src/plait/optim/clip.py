"""The global gradient norm from local shards, and clipping by value.

Clipping by norm has no function here: its factor goes into the optimizer step together with the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def grad_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> float:
    """The 2-norm of all gradients together, the same number on every rank.

    With a `group` this rank holds its part of each gradient, perhaps none; without one it holds them whole.
    Accumulated in fp32 or wider, so that half-precision gradients do not overflow.
    """
    squares = _square_sum(tensors)
    if group is not None:
        device = tensors[0].device if tensors else None
        box = torch.tensor(squares, dtype=torch.float64, device=device)
        dist.all_reduce(box, group=group)
        squares = float(box)
    return math.sqrt(squares) if squares >= 0.0 else math.nan


def _square_sum(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    # Asking for fp32 of an fp64 tensor is refused as narrowing; without a dtype each keeps its own.
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    norms = torch._foreach_norm(tensors, 2, dtype=None if wide else torch.float32)
    if tensors[0].device.type == "cpu":
        return sum(norm.item() ** 2 for norm in norms)
    # One wait for the device, not one for each tensor.
    return float(torch.stack(norms).double().square().sum())


@torch.no_grad()
def clip_by_value(tensors: Sequence[Tensor], limit: float) -> None:
    """Cut every gradient element in place to [-limit, limit]."""
    if tensors:
        torch._foreach_clamp_min_(tensors, -limit)
        torch._foreach_clamp_max_(tensors, limit)
