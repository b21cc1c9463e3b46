"""Moving tensors into and out of tensor-parallel work. Each move has its own way back.

| move       | forward                   | backward                  | from → to                                     |
|------------|---------------------------|---------------------------|-----------------------------------------------|
| `spread`   | –                         | sum                       | whole → whole, of which each rank uses a part |
| `total`    | sum                       | –                         | summands → whole                              |
| `gather`   | gather                    | sum, keep own part        | parts → whole, of which each rank uses a part |
| `scatter`  | sum, keep own part        | gather                    | summands → parts                              |
| `cut`      | keep own part             | gather                    | whole → parts                                 |
| `join`     | gather                    | keep own part             | parts → whole, which all ranks use alike      |
| `exchange` | all-to-all                | all-to-all                | rows of everyone's part → own part, whole     |

"Whole" is the same on every rank. The difference between `gather` and `join` is what comes back: where the ranks
share the work that follows, each has a summand of the gradient; where all do the same work, each has all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.world import all_gather_flat, reduce_scatter_flat

Way = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def spread(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand a whole tensor to work that the ranks share."""
    return _moved(x, _keep, _sum, 0, group)


def spread_parameter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`spread` for a parameter: the gradient's summands are added in fp32, whatever their dtype."""
    return _moved(x, _keep, _sum_in_fp32, 0, group)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what every rank has."""
    return _moved(x, _sum, _keep, 0, group)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All parts along `dim`, for work that the ranks share."""
    return _moved(x, _gather, _scatter, dim, group)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along `dim`, of the sum of what every rank has."""
    return _moved(x, _scatter, _gather, dim, group)


def cut(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along `dim`, of a whole tensor."""
    return _moved(x, _cut, _gather, dim, group)


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All parts along `dim`, for work that every rank does alike."""
    return _moved(x, _gather, _cut, dim, group)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of (ranks, …), row r goes to rank r; what comes from rank r becomes row r."""
    return _moved(x, _exchange, _exchange, 0, group)


def _moved(x: Tensor, forward: Way, backward: Way, dim: int, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Move.apply(x, forward, backward, dim % max(x.ndim, 1), group)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.backward_way, ctx.dim, ctx.group = backward, dim, group
        return forward(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.backward_way(grad, ctx.dim, ctx.group), None, None, None, None


def _keep(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _sum_in_fp32(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _sum(x.float(), dim, group).to(x.dtype)


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_flat(parts, x.contiguous(), group=group)
    if dim == 0:
        return parts
    if x.shape[0] == 1 and dim == 1:
        return parts.flatten(0, 1)[None]  # in the right order already
    return torch.cat(parts.chunk(group.size()), dim)


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim))
    own = parts.new_empty((parts.shape[0] // group.size(), *parts.shape[1:]))
    reduce_scatter_flat(own, parts, group=group)
    return own


def _cut(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    share = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * share, share).clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
