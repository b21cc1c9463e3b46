"""How the squares of all ranks' gradients add up to one norm, on any layout.

Each rank adds the squares of its parts, divided by the number of ranks that hold the same part. A weight that two
pipeline stages share counts where the first of them holds it. So one all-reduce over all ranks is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from plait.errors import ModelError
from plait.strategy.native.views import Views
from plait.world import World, is_sharded

if TYPE_CHECKING:
    from plait.parallel import Stage


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


_UNLIKE = 0.05
"""By how much of its norm a gradient may differ between ranks that compute the same: kernels add in any order."""


def refuse_unlike_gradients(views: Views, world: World) -> bool:
    """Refuse parameters that each rank along `tp` holds whole, and of which each has another gradient.

    The plan has missed such a parameter: ranks would update it differently, and drift apart. Returns whether there
    was something to compare; gradients that are not finite tell nothing. Every rank must call it.
    """
    group = world.group("tp")
    assert group is not None
    pairs = zip(views.names, views.params, views.gather_gradients(), strict=True)
    whole = [(name, grad.detach().float()) for name, param, grad in pairs if not _lies_along(param, "tp")]
    if not whole or world.fake:
        return True
    # Sums of every fourth element: of gradients that differ, hardly all of them agree.
    sums = torch.stack([torch.stack([grad.flatten()[at::4].sum() for at in range(4)]) for _, grad in whole])
    norms = torch.stack([grad.norm() for _, grad in whole])
    gathered = [torch.empty_like(sums) for _ in range(world.layout.tp)]
    dist.all_gather(gathered, sums, group=group)
    every = torch.stack(gathered)
    dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
    if not bool(every.isfinite().all() & norms.isfinite().all()):
        return False
    apart = (every.amax(0) - every.amin(0)).amax(1) > _UNLIKE * norms
    unlike = [name for (name, _), differs in zip(whole, apart.tolist(), strict=True) if differs]
    if unlike:
        raise ModelError(
            f"the gradient of {unlike[0]!r} ({len(unlike)} such parameters) differs between the ranks of "
            "strategy.layout.tp: each has computed a part of it, and the tensor plan gives its module no word; write "
            "one in strategy.tensor.plan, such as `inner` where every rank uses the whole parameter, or set "
            "strategy.layout.tp: 1"
        )
    return True


def _lies_along(param: nn.Parameter, axis: str) -> bool:
    return is_sharded(param) and any(axis in name.split("_") for name in param.device_mesh.mesh_dim_names or ())


def _parts(param: nn.Parameter) -> int:
    """Into how many parts a parameter is cut."""
    if not is_sharded(param):
        return 1
    cut = zip(param.device_mesh.shape, param.placements, strict=True)
    return prod(size for size, placement in cut if not placement.is_replicate())
