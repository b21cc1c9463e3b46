"""Ranks with real DeepSpeed in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.multi.ranks import RankPool


def run_deepspeed(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What rank 0 answers to `function(rank, size, *args)`.

    The ranks are new, and are gone afterwards: the library changes the processes that it is loaded into.
    """
    pool = RankPool(ranks, timeout_s=280.0, lasting=True)
    try:
        return pool.run(function, *args)[0]
    finally:
        pool.close()


def real_deepspeed() -> Any:
    """The library, loaded into this rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at the start
    return deepspeed
