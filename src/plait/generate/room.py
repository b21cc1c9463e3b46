"""Whether whole weights and their cache fit beside what is there already."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from plait.models import Attention
from plait.world import World

MARGIN = 1.25
"""What activations, logits and fragments may take on top."""


def cache_bytes(model: nn.Module, *, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of so many rows. Of models that are not Plait's own it knows nothing, and says 0."""
    features = sum(2 * part.k.out_features for part in model.modules() if isinstance(part, Attention))
    return features * rows * tokens * dtype.itemsize


def free_bytes(world: World) -> int:
    """What this rank could still take; ranks of one machine share its memory out evenly."""
    if world.device.type != "cuda":
        available: int = psutil.virtual_memory().available
        return available // world.ranks.local_size
    free, _ = torch.cuda.mem_get_info(world.device)
    kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return free + kept


def fits(world: World, needed: int) -> bool:
    """Whether so much fits on every rank. Every rank must ask, and all get the same answer."""
    return not world.any(needed * MARGIN > free_bytes(world))
