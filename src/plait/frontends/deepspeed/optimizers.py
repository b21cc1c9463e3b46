"""`deepspeed.ops`: DeepSpeed's optimizers, made of torch's and Plait's. None needs compiling at first use."""

from __future__ import annotations

from torch.optim import Adagrad, Adam
from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem
from plait.optim import Lamb, Lion


class FusedAdam(Adam):
    """torch's AdamW, or its Adam if `adam_w_mode` is false; fused on CPU and CUDA.

    The engine decides where weights are stored, so this class also implements `DeepSpeedCPUAdam`. Gradients are always
    set to None.
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
    """`FusedAdam` with the order of arguments of DeepSpeedCPUAdam; its states are in fp32, as the weights."""

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
        _require_fp32_states(fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class FusedLion(Lion):
    """Plait's Lion. Gradients are always set to None."""

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
    """Plait's Lion; its state is in fp32, as the weights."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _require_fp32_states(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLamb(Lamb):
    """Plait's LAMB, also for sharded parameters. Trust ratios are clamped to `min_coeff` … `max_coeff`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        given_and_default = {
            "bias_correction": (bias_correction, True),
            "eps_inside_sqrt": (eps_inside_sqrt, False),
            "max_grad_norm": (max_grad_norm, 0.0),
            "amsgrad": (amsgrad, False),
        }
        problems = [
            Problem(name, f"{given!r} is not offered for LAMB", "Leave it out.")
            for name, (given, default) in given_and_default.items()
            if given != default
        ]
        if problems:
            raise ConfigError(problems)
        super().__init__(params, lr, betas, eps, weight_decay, min_coeff, max_coeff)


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


def _require_fp32_states(fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        message = "false is not offered: states have the format of the weights that they update"
        raise ConfigError(Problem("fp32_optimizer_states", message, "Leave it out."))
