"""`recompute: auto`, decided before anything has memory, and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plait.config.run import RunConfig
from plait.optim import is_one_pass
from plait.parallel.recompute import Way
from plait.parallel.units import Unit
from plait.precision import Policy
from plait.strategy.native.forward import Say
from plait.world import World

_SAID: dict[Way, str] = {
    "full": "everything",
    "attention": "everything but attention",
    "cheap": "what lies between products",
}


def choose_ways(
    module: nn.Module, units: Sequence[Unit], example: Any, *, config: RunConfig, world: World, late: bool, say: Say
) -> list[Way]:
    """What each unit computes again. `late`: gradients exist from their backward pass to the update only."""
    if config.strategy.recompute.mode != "auto":
        return []
    from plait.parallel.budget import ways_to_recompute

    ways = ways_to_recompute(module, units, example, config=config, world=world, late_gradients=late)
    counts = Counter(ways)
    told = [f"{counts[way]} of {len(ways)} blocks recompute {text}" for way, text in _SAID.items() if counts[way]]
    say(f"recompute: auto: {', '.join(told) or 'everything fits, and nothing is recomputed'}")
    return ways


def gradients_come_late(config: RunConfig, world: World, policy: Policy) -> bool:
    """Whether one process keeps each gradient as its backward pass made it; for steps of one micro-batch."""
    if world.layout.size > 1 or config.train.clip_value is not None:
        return False
    return not (policy.mixed and policy.master) or is_one_pass(config.optim, [torch.empty(1, device=world.device)])
