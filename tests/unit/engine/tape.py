"""What plays a CUDA graph where there is no CUDA, and a net that notices a pass too many.

A tape keeps every operation with the tensors that it read and wrote, and repeats them on those without any Python of
the model. Whatever a replay does not copy, fill in or hand over is missed here as it would be on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.models import LossTerm


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on any device."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.replays = 0
        self._calls: list[Any] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        with self:
            work()
        with torch.no_grad():  # a recording computes nothing yet
            for tensor, value in self._before.values():
                tensor.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and id(each) not in self._made and id(each) not in self._before:
                self._before[id(each)] = each, each.detach().clone()
        found = func(*args, **(kwargs or {}))
        self._made |= {id(each) for each in tree_leaves(found) if isinstance(each, Tensor)} - set(self._before)
        self._calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, found in self._calls:
            for room, result in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(room, Tensor) and room.data_ptr() != result.data_ptr():
                    room.copy_(result)


class Net(nn.Module):
    """Keeps statistics, so that a pass too many, or one too few, shows. One layer takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.idle = nn.Linear(2, 2)
        self.passes = 0

    def forward(self, x: Tensor, factor: float = 1.0) -> LossTerm:
        self.passes += 1
        error = (self.last(self.norm(self.first(x)).tanh()) * factor).square()
        return LossTerm(error.sum(), (x[:, 0] == x[:, 0]).sum())
