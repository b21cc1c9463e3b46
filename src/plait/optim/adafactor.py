"""Adafactor (Shazeer and Stern, 2018), with the maths of `torch.optim.Adafactor`.

[Note: why not torch's Adafactor] Measured with torch 2.13 and `fully_shard` on two CPU ranks: `torch.optim.Adafactor`
fails on DTensors ("in-place operations that require placement changes are not supported"), with `foreach` and without.
It also reads two norms per parameter on the host. This one takes two all-reduces per step for all parameters together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from plait.distributed import to_local
from plait.optim.base import PlaitOptimizer, with_gradient
from plait.optim.full_params import RowSharding, row_sharding, sum_over_shards


@dataclass(slots=True)
class _Item:
    """One parameter during a step, with its group, its sharding, and its number of updates."""

    parameter: Tensor
    group: dict[str, Any]
    rows: RowSharding | None
    count: float

    @property
    def local(self) -> Tensor:
        return to_local(self.parameter)

    @property
    def grad(self) -> Tensor:
        assert self.parameter.grad is not None
        return to_local(self.parameter.grad)

    @property
    def factored(self) -> bool:
        return self.parameter.ndim > 1


class Adafactor(PlaitOptimizer):
    """Second moments of matrices factored into a row and a column; steps relative to the parameter's own size.

    State: `step`; for vectors `variance`, of the parameter's own shape and sharding; for all else `row_var`
    (last dim 1) and `col_var` (last but one dim 1), which are plain tensors, **replicated on every rank** however
    the parameter is sharded. Sharded parameters give the same result as unsharded ones: see [Note: what an
    optimizer may be given]. A step does two all-reduces for each mesh axis over which parameters are sharded.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        items = [
            _Item(parameter, group, row_sharding(parameter), self._count(parameter))
            for group in self.param_groups
            for parameter in with_gradient(group)
        ]
        sums = self._sums(items)
        updates = [self._direction(item, *item_sums) for item, item_sums in zip(items, sums, strict=True)]
        squares = [update.square().sum() for update in updates]
        totals = sum_over_shards(squares, [item.rows for item in items])
        for item, (size, *_), update, total in zip(items, sums, updates, totals, strict=True):
            self._apply(item, size, update, total)

    def _sums(self, items: list[_Item]) -> list[list[Tensor]]:
        """Return for each parameter the sum of its squares; if factored, also the gradient's by row and by column."""
        item_tensors = [_squares(item) for item in items]
        flat = [tensor for tensors in item_tensors for tensor in tensors]
        rows = [item.rows for item, tensors in zip(items, item_tensors, strict=True) for _ in tensors]
        totals = iter(sum_over_shards(flat, rows))
        return [[next(totals) for _ in tensors] for tensors in item_tensors]

    def _direction(self, item: _Item, _: Tensor, *by_row_and_column: Tensor) -> Tensor:
        """Return the gradient divided by the root of its estimated second moment."""
        weight = item.count ** item.group["beta2_decay"]
        eps = _eps(item)
        if item.factored:
            by_row, by_column = by_row_and_column
            row = self._factor(item.parameter, "row_var", by_row)
            column = self._factor(item.parameter, "col_var", by_column)
            row.lerp_(by_row.div_(item.parameter.shape[-1]), weight)
            column.lerp_(by_column.div_(item.parameter.shape[-2]), weight)
            scale = row.mean(dim=-2, keepdim=True).clamp_(min=eps)
            if item.rows is not None:
                row = item.rows.local_rows(row)
                if item.parameter.ndim > 2:
                    column, scale = item.rows.local_rows(column), item.rows.local_rows(scale)
            estimate = (row @ column).div_(scale)
        else:
            variance = to_local(self._moment(item.parameter, "variance"))
            estimate = variance.lerp_(item.grad.square(), weight).clone()
        return estimate.clamp_(min=eps * eps).rsqrt_().mul_(item.grad)

    def _apply(self, item: _Item, size: Tensor, update: Tensor, total: Tensor) -> None:
        group, numel = item.group, max(1, item.parameter.numel())
        rate = min(group["lr"], item.count**-0.5)
        length = (size / numel).sqrt_().clamp_(min=group["eps"][1]).mul_(rate)
        excess = (total / numel).sqrt_().div_(group["clip_threshold"]).clamp_(min=1.0)
        if group["weight_decay"] != 0:
            item.local.mul_(1 - group["lr"] * group["weight_decay"])
        item.local.sub_(update.mul_(length.div_(excess)))

    def _factor(self, parameter: Tensor, name: str, like: Tensor) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(like)
        tensor: Tensor = state[name]
        return tensor


def _squares(item: _Item) -> list[Tensor]:
    size = item.local.square().sum()
    if not item.factored:
        return [size]
    squared = item.grad.square()
    by_row, by_column = squared.sum(dim=-1, keepdim=True), squared.sum(dim=-2, keepdim=True)
    if item.rows is not None:
        by_row = item.rows.zero_padded(by_row)
        if item.parameter.ndim > 2:
            by_column = item.rows.zero_padded(by_column)
    return [size, by_row, by_column]


def _eps(item: _Item) -> float:
    eps: float | None = item.group["eps"][0]
    return torch.finfo(item.parameter.dtype).eps if eps is None else eps
