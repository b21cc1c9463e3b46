"""`accelerate.utils`: the functions and classes that scripts take from there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plait.frontends.accelerate.dummies import DummyOptim, DummyScheduler
from plait.frontends.accelerate.memory import find_executable_batch_size
from plait.frontends.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
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
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather_object",
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


def gather_object(value: Any) -> list[Any]:
    """Every rank's list of objects, as one list."""
    if not dist.is_initialized():
        return list(value)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return [each for part in parts for each in part]


def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """One rank's objects, in the places of everybody's."""
    if dist.is_initialized():
        dist.broadcast_object_list(objects, src=from_process)
    return objects
