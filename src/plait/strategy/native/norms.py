"""How the squares of all ranks' gradients add up to one norm, on any layout.

Each rank adds the squares of its parts, divided by the number of ranks that hold the same part. A weight that two
pipeline stages share counts where the first of them holds it. So one all-reduce over all ranks is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from plait.strategy.native.views import Views
from plait.world import World, is_sharded

if TYPE_CHECKING:
    from plait.parallel.pipeline import Stage


def weigh_norms(views: Views, world: World, stages: Sequence[Stage]) -> None:
    """Tell the views over which ranks the squares are summed, and how much each of this rank's counts."""
    layout = world.layout
    if layout.tp == layout.ep == layout.pp == 1:  # every part is on one rank only, or every rank has all of them
        spread = any(is_sharded(param) for param in views.params)
        views.norm_group = world.group("dp_shard", "cp") if spread else None
        return
    views.norm_group = world.everyone
    here = {stage.index for stage in stages}
    elsewhere = {name for stage in stages for name, holders in stage.tied.items() if holders[0] not in here}
    views.norm_weights = [
        0.0 if name in elsewhere else _parts(param) * layout.pp / layout.size
        for name, param in zip(views.names, views.params, strict=True)
    ]


def _parts(param: nn.Parameter) -> int:
    """Into how many parts a parameter is cut."""
    if not is_sharded(param):
        return 1
    cut = zip(param.device_mesh.shape, param.placements, strict=True)
    return prod(size for size, placement in cut if not placement.is_replicate())
