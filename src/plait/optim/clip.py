"""The global gradient norm from local shards, and clipping. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormPart:
    """Local gradients that are spread over the same ranks.

    Without a `group` this rank holds them whole, and they are the same on every rank.
    """

    tensors: Sequence[Tensor]
    group: dist.ProcessGroup | None = None


def grad_norm(parts: Sequence[NormPart], *, device: torch.device | str | None = None) -> Tensor:
    """The 2-norm of all gradients together, as a scalar tensor equal on all ranks.

    Accumulated in fp32 (fp64 for fp64 gradients), so that half-precision gradients do not overflow. Tensors
    may be empty, and so may a part, which still takes part in its reduction; give `device` if all may be.
    """
    norms = [_local_norm(part.tensors) for part in parts]
    if len(parts) == 1 and parts[0].group is None and norms[0] is not None:
        return norms[0]
    where = next((norm.device for norm in norms if norm is not None), device)
    total = torch.zeros((), device=where)
    for part, norm in zip(parts, norms, strict=True):
        squared = torch.zeros((), device=where) if norm is None else norm.square()
        if part.group is not None:
            dist.all_reduce(squared, group=part.group)
        total = total + squared
    return total.sqrt()


@torch.no_grad()
def clip_by_norm(tensors: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place so that their global `norm` becomes at most `limit`, as torch does it."""
    if tensors:
        torch._foreach_mul_(list(tensors), (limit / (norm + 1e-6)).clamp_(max=1.0))


@torch.no_grad()
def clip_by_value(tensors: Sequence[Tensor], limit: float) -> None:
    """Cut every gradient element in place to [-limit, limit]."""
    if tensors:
        tensors = list(tensors)
        torch._foreach_clamp_min_(tensors, -limit)
        torch._foreach_clamp_max_(tensors, limit)


def _local_norm(tensors: Sequence[Tensor]) -> Tensor | None:
    if not tensors:
        return None
    # Asking for fp32 of an fp64 tensor is refused as narrowing; without a dtype each keeps its own.
    wide = torch.float64 in [tensor.dtype for tensor in tensors]
    norms = torch._foreach_norm(list(tensors), 2, dtype=None if wide else torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total
