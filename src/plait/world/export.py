"""Telling other libraries, in the one way that they listen to, what this process knows."""

from __future__ import annotations

import os

from plait.world.ranks import Ranks


def export_ranks(ranks: Ranks) -> None:
    """Set torchrun's variables, for libraries that read them, where another launcher left them out."""
    known = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_size,
        "LOCAL_SIZE": ranks.local_size,
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": ranks.port or 29500,
    }
    for name, value in known.items():
        os.environ.setdefault(name, str(value))
