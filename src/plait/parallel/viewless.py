"""Outputs of sharded modules that may be changed in place.

[Note: no views] `fully_shard` gathers a unit's weights again when the gradient of its output comes, told by a hook on
that output. A view loses its hooks when somebody adds to it in place, as `x = block(x); x += shortcut` does, and the
backward pass then finds no weights. Most layers answer with views: a linear one does for any input of three dimensions.
So what a module returns is taken out of the family of its views first, at the price of a node in the graph and of no
memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from plait.torch_internals import fsdp_around_outputs, fsdp_state, is_view, tree_map_only


def return_no_views(modules: Iterable[FSDPModule]) -> None:
    """See that sharded modules return tensors of their own; see [Note: no views]."""
    for module in modules:
        fsdp_around_outputs(fsdp_state(module), _first_apart)


def _first_apart(register: Any) -> Any:
    def registered(output: Any) -> Any:
        return register(tree_map_only(Tensor, _apart, output) if torch.is_grad_enabled() else output)

    return registered


def _apart(tensor: Tensor) -> Tensor:
    if not is_view(tensor) or not tensor.requires_grad:
        return tensor
    out: Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return out


class _Apart(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is nobody's view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
