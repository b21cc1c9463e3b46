"""LAMB (You et al., 2020): Adam's update, scaled to a length proportional to the norm of the parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from plait.distributed import to_local
from plait.optim.base import PlaitOptimizer, with_gradient
from plait.optim.clip import tensor_norms
from plait.optim.full_params import group_by_sharding, sum_over_shards
from plait.torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)


class Lamb(PlaitOptimizer):
    """Adam with a trust ratio ‖parameter‖ / ‖update‖ per parameter, clamped to [min_trust, max_trust].

    The update is the bias-corrected Adam direction plus `weight_decay` times the parameter; if either norm is zero, the
    ratio is one. State: `step`, and `exp_avg` and `exp_avg_sq` of the parameter's own shape and sharding. Sharded
    parameters give the same result as unsharded ones: see [Note: what an optimizer may be given]. All norms are summed
    in one all-reduce, so all updates of a step exist at the same time.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        min_trust: float = 0.0,
        max_trust: float = 10.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "min_trust": min_trust,
            "max_trust": max_trust,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        batches = [
            (group, params, rows)
            for group in self.param_groups
            for params, rows in group_by_sharding(with_gradient(group))
        ]
        updates = [self._directions(group, params) for group, params, _ in batches]
        squares = [
            torch.stack([*tensor_norms([to_local(p) for p in params]), *tensor_norms(directions)]).square_()
            for (_, params, _), directions in zip(batches, updates, strict=True)
        ]
        totals = sum_over_shards(squares, [rows for *_, rows in batches])
        for (group, params, _), directions, total in zip(batches, updates, totals, strict=True):
            foreach_mul_(directions, _trust_ratios(total.sqrt_(), group))
            foreach_add_([to_local(p) for p in params], directions, alpha=-group["lr"])

    def _directions(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        counts = [self._count(p) for p in params]
        local = [to_local(p) for p in params]
        grads = [to_local(p.grad) for p in params if p.grad is not None]
        means = [to_local(self._moment(p, "exp_avg")) for p in params]
        squares = [to_local(self._moment(p, "exp_avg_sq")) for p in params]
        foreach_lerp_(means, grads, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = foreach_sqrt(squares)
        foreach_div_(roots, [math.sqrt(1 - beta2**count) for count in counts])
        foreach_add_(roots, group["eps"])
        directions = foreach_div(means, [1 - beta1**count for count in counts])
        foreach_div_(directions, roots)
        if group["weight_decay"] != 0:
            foreach_add_(directions, local, alpha=group["weight_decay"])
        return list(directions)


def _trust_ratios(norms: Tensor, group: dict[str, Any]) -> list[Tensor]:
    parameters, updates = norms.chunk(2)
    ratios = (parameters / updates).clamp_(group["min_trust"], group["max_trust"])
    return list(torch.where((parameters > 0) & (updates > 0), ratios, 1.0).unbind())
