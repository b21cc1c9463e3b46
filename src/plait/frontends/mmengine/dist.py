"""Rank, world size and collectives, for code without a runner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

T = TypeVar("T")


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def get_dist_info() -> tuple[int, int]:
    """Return the rank and the number of processes."""
    return get_rank(), get_world_size()


def is_distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def barrier() -> None:
    """Wait until every rank has called this."""
    if is_distributed():
        dist.barrier()


def master_only(function: Callable[..., T]) -> Callable[..., T | None]:
    """Return a function that runs on rank 0 only; other ranks return None."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if is_main_process() else None

    return guarded


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def sync_random_seed() -> int:
    """Return a random seed, the same on every rank."""
    return broadcast_object(int(np.random.randint(2**31)))


def collect_results(results: list[Any], size: int) -> list[Any]:
    """Return every rank's results in the order of the samples, without those of repeated samples."""
    by_rank = all_gather_object(results)
    rounds = range(max(map(len, by_rank)))
    return [of_rank[index] for index in rounds for of_rank in by_rank if index < len(of_rank)][:size]
