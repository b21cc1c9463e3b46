"""`deepspeed.ops.lion`."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from plait.frontends.deepspeed.ops.states import only_fp32_states
from plait.optim import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(Lion):
    """Plait's Lion. Gradients are always set to none."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion):
    """The same one; its state has the format of the weights, fp32."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        only_fp32_states(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
