"""`deepspeed.ops.adam`: DeepSpeed's two Adams, both torch's, which is fused on CPU and CUDA."""

from __future__ import annotations

from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.ops.states import only_fp32_states

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(Adam):
    """torch's AdamW, or its Adam where `adam_w_mode` is false.

    Where weights lie is decided by the engine, so one serves for both names. Gradients are always set to none.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            message = "false is not offered: torch's Adam always corrects its first steps"
            remedy = "Leave it out, and lower the rate of the first steps."
            raise ConfigError(Problem("bias_correction", message, remedy))
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(FusedAdam):
    """The same optimizer with DeepSpeed's other order of arguments; its states have the format of the weights, fp32."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        only_fp32_states(fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
