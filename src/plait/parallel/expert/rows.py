"""Rows of a batch that several ranks share: what routers sum up over a row."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import ConfigError, Problem
from plait.parallel.expert.exchange import sum_over_ranks


def share_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tell the routers of a model that each row of a batch lies in parts on the ranks of a 1-D mesh, in place.

    Their balance and z loss are then those of the whole row, on each of its ranks, and a row's choices count as load
    wherever its targets are. For each of the two, where there is such a loss or a bias that balances, it takes one
    small sum a router and forward, and one backward.
    """
    assert mesh.ndim == 1, "rows are cut along one axis"
    for module in model.modules():
        if not hasattr(module, "sum_over_row"):
            continue
        if getattr(module, "capacity_factor", None) is not None:
            message = f"an expert's capacity is counted along a row, and here rows are cut over {mesh.size()} ranks"
            remedy = "leave it out, or set strategy.layout.cp: 1"
            raise ConfigError(Problem("model.capacity_factor", message, remedy))
        router: Any = module
        router.sum_over_row = partial(sum_over_ranks, group=mesh.get_group())
