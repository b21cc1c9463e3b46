"""Stages whose parameters are sharded (`fully_shard`), where a backward pass comes in two halves.

In a whole backward pass, sharding looks after itself: it gathers before, and scatters after the last use of a
block's parameters. Its hooks sit on the blocks' inputs, so they would fire in the first half, before there are
gradients of weights. Therefore such a stage keeps whole parameters and gradients from its first backward pass on,
and scatters once, after its last.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from plait.torch_internals import fsdp_hold_back, fsdp_reduce


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether the root of a stage was given to `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def reduce_last(module: nn.Module, *, last: bool) -> None:
    """Have the gradients of a sharded stage reduced by the last backward pass of a step only."""
    root = cast(Any, module)
    root.set_requires_gradient_sync(last)
    root.set_is_last_backward(last)


def hold_back(module: nn.Module) -> None:
    """Before a backward pass, or a half: whole parameters, and gradients stay where they are."""
    from torch.distributed.fsdp import FSDPModule

    fsdp_hold_back(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()


def let_go(module: nn.Module) -> None:
    """After the last: scatter the gradients, and let go of whole parameters."""
    fsdp_reduce(module)
