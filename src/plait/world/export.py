"""Telling other libraries, in the one way that they listen to, what this process knows."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from plait.world.device import choose_backend
from plait.world.ranks import DEFAULT_PORT, Ranks


def export_ranks(ranks: Ranks) -> None:
    """Set torchrun's variables, for libraries that read them, where another launcher left them out."""
    known = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_size,
        "LOCAL_SIZE": ranks.local_size,
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": ranks.port or DEFAULT_PORT,
    }
    for name, value in known.items():
        os.environ.setdefault(name, str(value))


def open_group_of_one(device: torch.device) -> None:
    """Make a process group for one process alone, for libraries that want one; nothing where there is a group."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(choose_backend("auto", device), store=store, rank=0, world_size=1)
