"""`accelerate.utils`: the functions and classes that scripts take from there."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist

from plait.frontends.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "set_seed",
]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; `device_specific`: another seed on every rank."""
    if device_specific and dist.is_initialized():
        seed += dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
