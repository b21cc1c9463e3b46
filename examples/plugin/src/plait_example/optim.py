"""An optimizer of one's own: momentum, softened so that no step is larger than `lr`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer


class SoftSign(Optimizer):
    """Moves every number by `lr` × m / (|m| + `eps`), where m is its momentum: with a small `eps` by its sign."""

    elementwise: ClassVar[bool] = True
    """Each number is updated by itself, so that under ZeRO a shard of a parameter is enough."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        eps: float = 0.1,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(momentum, momentum.abs() + group["eps"], value=-group["lr"])
        return loss
