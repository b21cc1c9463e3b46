"""Who am I among the ranks? For code that has no runner at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

T = TypeVar("T")


def get_rank() -> int:
    """Rank of this process; 0 where there is one process."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def get_dist_info() -> tuple[int, int]:
    """Rank and number of processes."""
    return get_rank(), get_world_size()


def is_distributed() -> bool:
    """Whether there are several processes that know each other."""
    return dist.is_available() and dist.is_initialized()


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def barrier() -> None:
    """Wait until every rank is here."""
    if is_distributed():
        dist.barrier()


def master_only(function: Callable[..., T]) -> Callable[..., T | None]:
    """A function that only rank 0 calls; the others get None."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if is_main_process() else None

    return guarded


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def sync_random_seed() -> int:
    """A seed that nobody chose, the same on every rank."""
    return broadcast_object(int(np.random.randint(2**31)))


def collect_results(results: list[Any], size: int) -> list[Any]:
    """Every rank's results in the order in which the samples were dealt out, without those that were dealt twice."""
    results_of_ranks = all_gather_object(results)
    dealt = [
        rank_results[index]
        for index in range(max(map(len, results_of_ranks)))
        for rank_results in results_of_ranks
        if index < len(rank_results)
    ]
    return dealt[:size]
