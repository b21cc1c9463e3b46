"""`deepspeed.ops.lion`."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem
from plait.optim.lion import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


def FusedLion(  # noqa: N802  # DeepSpeed's name
    params: ParamsT,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> Lion:
    """Plait's Lion. Gradients are always set to none."""
    return Lion(params, lr, betas, weight_decay)


def DeepSpeedCPULion(  # noqa: N802  # DeepSpeed's name
    model_params: ParamsT,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> Lion:
    """The same one; its state has the format of the weights, fp32."""
    if not fp32_optimizer_states:
        message = "false is not offered: states are kept in the format of the weights that they update"
        raise ConfigError(Problem("fp32_optimizer_states", message, "Leave it out."))
    return Lion(model_params, lr, betas, weight_decay)
