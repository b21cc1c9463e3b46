"""`deepspeed.ops.adagrad`."""

from __future__ import annotations

from torch.optim import Adagrad
from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """torch's Adagrad."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            name = "amsgrad" if amsgrad else "fp32_optimizer_states"
            raise ConfigError(Problem(name, "is not offered for Adagrad", "Leave it out."))
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
