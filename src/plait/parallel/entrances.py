"""Parts of a sharded model that are called by themselves, and not by the model.

`fully_shard` gathers what belongs to none of its units when the model is called, and only then. Scripts also call a
head, a trunk, or a method of the model that goes through both: at stage 3 they would find parts of weights. So each
module outside of the units gathers for itself, unless the model, or a module around it, has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def open_entrances(model: nn.Module, before: Callable[[], None]) -> None:
    """Let parts of a sharded model be called by themselves; `before` is done first, each time."""
    sharded: Any = model
    state = sharded._get_fsdp_state()
    state._lazy_init()
    if state._fsdp_param_group is not None:
        entrance = _Entrance(state, before)
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

    def __init__(self, state: Any, before: Callable[[], None]) -> None:
        self._state = state
        self._before = before
        self._inside = 0
        """How many modules that were entered here have yet to be left."""

    @property
    def _in_use(self) -> bool:
        """Whether the model itself runs, forwards or backwards."""
        return bool(self._state._training_state.name != "IDLE")

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        """Gather, before a module is called from outside."""
        self._inside += 1
        group = self._state._fsdp_param_group
        if self._inside == 1 and not self._in_use:
            self._before()
        if not group.is_unsharded:
            group.unshard()
            group.wait_for_unshard()

    def leave(self, module: nn.Module, _inputs: Any, answer: Any) -> None:
        """Let go, and gather again in the backward pass."""
        self._inside -= 1
        if not self._inside and not self._in_use:
            self._state._register_pre_backward_hook(answer)
            self._state._fsdp_param_group.reshard()
