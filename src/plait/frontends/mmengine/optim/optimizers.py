"""Optimizers by name: torch's own, and those that other engines made popular."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.registry import OPTIMIZERS
from plait.optim import Lion

OPTIMIZERS.register_module(module=Lion)
for _name, _kind in vars(torch.optim).items():
    if isinstance(_kind, type) and issubclass(_kind, Optimizer) and _kind is not Optimizer:
        OPTIMIZERS.register_module(name=_name, module=_kind)


@OPTIMIZERS.register_module(name=["HybridAdam", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam"])
def HybridAdam(  # noqa: N802  # it stands for a class
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    adam_w_mode: bool | None = None,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """ColossalAI's and DeepSpeed's Adam: torch's AdamW, or Adam where `adamw_mode` is off.

    Where the states lie is the strategy's business; of the options, those that ask for another result or place are
    refused.
    """
    refused = {
        "bias_correction": not bias_correction,
        "nvme_offload_fraction": nvme_offload_fraction > 0 or nvme_offload_dir is not None,
        "fp32_optimizer_states": not fp32_optimizer_states,
    }
    problems = [
        Problem(f"optimizer.{key}", "torch's Adam, which trains here, has no such option", "Leave it out.")
        for key, wanted in refused.items()
        if wanted
    ]
    if problems:
        raise ConfigError(problems)
    kind = AdamW if (adamw_mode if adam_w_mode is None else adam_w_mode) else Adam
    return kind(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
