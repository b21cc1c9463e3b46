"""`deepspeed.ops.lamb`."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError, Problem
from plait.optim import Lamb

__all__ = ["FusedLamb"]


class FusedLamb(Lamb):
    """Plait's LAMB, whose trust ratios are right for sharded parameters too; between `min_coeff` and `max_coeff`."""

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
        usual = {"bias_correction": True, "eps_inside_sqrt": False, "max_grad_norm": 0.0, "amsgrad": False}
        given = {
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
        }
        problems = [
            Problem(name, f"{given[name]!r} is not offered for LAMB", "Leave it out.")
            for name, value in usual.items()
            if given[name] != value
        ]
        if problems:
            raise ConfigError(problems)
        super().__init__(params, lr, betas, eps, weight_decay, min_coeff, max_coeff)
