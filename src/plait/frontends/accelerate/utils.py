"""`accelerate.utils`: the functions and classes that scripts take from there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plait.config import Layout
from plait.frontends.accelerate.dummies import DummyOptim, DummyScheduler
from plait.frontends.accelerate.gather import Gatherer
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
from plait.frontends.accelerate.prepared import apply
from plait.world import World
from plait.world.ranks import Ranks
from plait.world.world import make_mesh

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
    "broadcast",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
    "wait_for_everyone",
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


# ---- tensors of all ranks; with axes other than data, an `Accelerator` knows more: it takes one of each that are equal


def gather(tensor: Any) -> Any:
    """Nested tensors of all ranks, one after another along the first dimension."""
    return _everyone().gather(tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The mean or sum of nested tensors over all ranks, times `scale`."""
    return _everyone().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Nested tensors, each as long as the longest of all ranks."""
    return _everyone().pad(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """One rank's nested tensors, in the places of everybody's."""

    def one(part: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.broadcast(part, src=from_process)
        return part

    return apply(one, tensor)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Nested tensors on a device; what a mapping has under `skip_keys` stays where it is."""
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if isinstance(tensor, Mapping) and skipped & tensor.keys():
        moved = {
            key: value if key in skipped else send_to_device(value, device, non_blocking)
            for key, value in tensor.items()
        }
        return type(tensor)(moved)  # type: ignore[call-arg]
    return apply(lambda part: part.to(device, non_blocking=non_blocking), tensor)


def wait_for_everyone() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def _everyone() -> Gatherer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return _gatherer(rank, size)


@cache
def _gatherer(rank: int, size: int) -> Gatherer:
    """Made once over the group that is there: to open a world anew would take the heartbeat of the run each time."""
    device = torch.device("cuda" if size > 1 and dist.get_backend() == "nccl" else "cpu")
    layout = Layout(dp_replicate=size)
    mesh = make_mesh(layout, device) if size > 1 else None
    return Gatherer(World(Ranks(rank, size, rank, size, launcher="caller"), device, layout, mesh, owns_processes=False))
