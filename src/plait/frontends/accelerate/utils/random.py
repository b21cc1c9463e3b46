"""`accelerate.utils.random`: seeds, and synchronizing random state over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plait.errors import TrainingError


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; `device_specific`: each rank has a different seed."""
    if device_specific and dist.is_initialized():
        seed += dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Copy rank 0's random state to every rank: `rng_type` is `torch`, `cuda` or `generator`."""
    name = str(getattr(rng_type, "value", rng_type))
    if name not in ("torch", "cuda", "generator"):
        raise TrainingError(f"rng_type {name!r} is not supported: write torch, cuda or generator")
    if name == "generator" and generator is None:
        raise TrainingError("synchronize_rng_state('generator') needs the generator")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = torch.cuda.get_rng_state() if name == "cuda" else (generator or torch.default_generator).get_state()
    states = [state]
    dist.broadcast_object_list(states, src=0)
    if name == "cuda":
        torch.cuda.set_rng_state(states[0])
    else:
        (generator or torch.default_generator).set_state(states[0])


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Call `synchronize_rng_state` for each type."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)
