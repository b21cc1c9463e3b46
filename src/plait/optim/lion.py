"""Lion (Chen et al., 2023): the sign of an interpolated momentum."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from plait.optim.base import PlaitOptimizer, with_gradient
from plait.torch_internals import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


class Lion(PlaitOptimizer):
    """Each element changes by exactly `lr` per step, up or down; weight decay is decoupled. State: `exp_avg`.

    It is elementwise, so shards are updated in the same way as full parameters.
    """

    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self) -> None:
        for group in self.param_groups:
            params = with_gradient(group)
            if not params:
                continue
            grads = [p.grad for p in params if p.grad is not None]
            moments = [self._moment(p, "exp_avg") for p in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            directions = foreach_lerp(moments, grads, 1 - beta1)
            foreach_sign_(directions)
            if group["weight_decay"] != 0:
                foreach_mul_(params, 1 - lr * group["weight_decay"])
            foreach_add_(params, directions, alpha=-lr)
            foreach_lerp_(moments, grads, 1 - beta2)
