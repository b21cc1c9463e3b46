"""`deepspeed.ops.adagrad`."""

from __future__ import annotations

from torch.optim import Adagrad
from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem

__all__ = ["DeepSpeedCPUAdagrad"]


def DeepSpeedCPUAdagrad(  # noqa: N802  # DeepSpeed's name
    model_params: ParamsT,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> Adagrad:
    """torch's Adagrad."""
    if amsgrad or not fp32_optimizer_states:
        name = "amsgrad" if amsgrad else "fp32_optimizer_states"
        raise ConfigError(Problem(name, "is not offered for Adagrad", "Leave it out."))
    return Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
