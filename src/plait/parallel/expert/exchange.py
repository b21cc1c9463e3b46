"""Collectives that gradients go through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.torch_internals import functional_collectives as funcol


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` rows, in order, to each rank r of the group; get `received[r]` from each, in order.

    The gradient goes the way back.
    """
    result: Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row r of `sent` (ranks, …) goes to rank r; what comes back has each rank's row for this one."""
    return _all_to_all(sent, [1] * len(sent), [1] * len(sent), group)


def sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, each of which goes on computing with it: so gradients are summed as well."""
    result: Tensor = _Sum.apply(sums, group)  # type: ignore[no-untyped-call]
    return result


def for_own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor that all ranks have alike, and of which each uses some: gradients are summed."""
    result: Tensor = _Spread.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def total(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, which all of them use alike: the gradient is every rank's own."""
    result: Tensor = _Total.apply(part, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = sent, received, group
        result = _all_to_all(rows, received, sent, group)
        # Recomputation stops after the last tensor that was kept. Every rank has to come as far as here, whatever
        # its rows ask for, so something is kept here.
        ctx.save_for_backward(result.new_empty(0))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.way_back), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(sums.new_empty(0))  # as in `_Exchange`
        return _all_reduce(sums, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_to_all_single(rows.contiguous(), received, sent, group))


def _all_reduce(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_reduce(sums.contiguous(), "sum", group))


def _wait(on_its_way: Tensor) -> Tensor:
    arrived: Tensor = funcol.wait_tensor(on_its_way)  # type: ignore[no-untyped-call]
    return arrived
