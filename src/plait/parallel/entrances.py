"""Parts of a sharded model that are called by themselves, and not by the model.

`fully_shard` gathers what belongs to none of its units when the model is called, and only then. Scripts also call a
head, a trunk, or a method of the model that goes through both: at stage 3 they would find parts of weights. So each
module outside of the units gathers for itself, unless the model, or a module around it, has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from plait.torch_internals import (
    fsdp_expect_backward,
    fsdp_gather,
    fsdp_group,
    fsdp_in_use,
    fsdp_is_gathered,
    fsdp_let_go,
    fsdp_start,
    fsdp_state,
)


def open_entrances(model: nn.Module, before: Callable[[], None]) -> None:
    """Let parts of a sharded model be called by themselves; `before` is done first, each time."""
    fsdp_start(model)
    if fsdp_group(model) is not None:
        entrance = _Entrance(model, before)
        for module in _outside_of_units(model):
            module.register_forward_pre_hook(entrance.enter)
            module.register_forward_hook(entrance.leave, always_call=True)


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not hasattr(child, "unshard"):
            yield child
            yield from _outside_of_units(child)


class _Entrance:
    """To what a model gathers when it is called: the weights that belong to none of its units."""

    def __init__(self, model: nn.Module, before: Callable[[], None]) -> None:
        self._state = fsdp_state(model)
        self._group = fsdp_group(model)
        self._before = before
        self._inside = 0
        """How many modules that were entered here have yet to be left."""

    @property
    def _in_use(self) -> bool:
        """Whether the model itself runs, forwards or backwards."""
        return fsdp_in_use(self._state)

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        """Gather, before a module is called from outside."""
        self._inside += 1
        if self._inside == 1 and not self._in_use:
            self._before()
        if not fsdp_is_gathered(self._group):
            fsdp_gather(self._group)

    def leave(self, module: nn.Module, _inputs: Any, answer: Any) -> None:
        """Let go, and gather again in the backward pass."""
        self._inside -= 1
        if not self._inside and not self._in_use:
            fsdp_expect_backward(self._state, answer)
            fsdp_let_go(self._group)
