"""The whole weights of sharded modules, of which each rank owns a part: when they are there, and who sees them.

`fully_shard` gathers them when the model runs, and puts them in the place of the parts. Below stage 3 they stay until
the last backward pass of a step. Nothing but the parts is updated, saved and loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from plait.torch_internals import (
    fsdp_end_of_backward,
    fsdp_gathers,
    fsdp_group,
    fsdp_is_apart,
    fsdp_is_root,
    fsdp_params,
    fsdp_part,
    fsdp_show,
    fsdp_shown,
    fsdp_start,
    fsdp_state,
    fsdp_state_dict_hooks,
    fsdp_wait,
)
from plait.transformers_internals import generate_alone


class Wholes:
    """The sharded modules of one model. Without any, there is nothing to do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
        self.kept = False
        """Whether they are there between steps, too."""

    def keep(self) -> None:
        """Have them between steps, too, from now on; every rank must call it.

        `state_dict` then gives them, on any rank alone: what the model computes with, in its format. What is written
        into them is gone after the next update.
        """
        if not self._modules:
            return
        self.kept = True
        for module in self._modules:
            fsdp_start(module)
        for group in self._groups():  # hooks by which `state_dict` shows the parts
            for handle in fsdp_state_dict_hooks(group):
                handle.remove()
        for module in self._model.modules():
            if hasattr(module, "generate"):
                generate_alone(module)
        self.renew()

    def expect(self, loss: Tensor) -> None:
        """A backward pass begins at this loss: have the gradients of all modules completed at its end.

        torch learns of a pass from what its modules have answered. A loss may come from a part of the model that was
        called by itself, of which torch knows nothing; the gradients would stay where they are, and be lost.
        """
        state = fsdp_state(self._modules[0]) if self._modules else None
        if state is not None and fsdp_is_root(state) and loss.requires_grad:
            finish = fsdp_end_of_backward(state)
            loss.register_hook(lambda _grad: finish())  # type: ignore[no-untyped-call]

    def renew(self) -> None:
        """The parts have changed: let go of what was gathered before, and gather it anew where it is kept."""
        if not self._modules:
            return
        self._let_go()
        if self.kept:
            for module in self._modules:
                module.unshard()

    def let_go(self) -> None:
        """Let go of those that a forward pass without a backward pass has left, unless they are kept.

        They would hide the parts, and the next step would compute with them even if the parts have changed since.
        """
        if not self.kept:
            self._let_go()

    def _let_go(self) -> None:
        for group in self._groups():
            # Gathered ahead for a module that did not come next: still to arrive, and old when it is used.
            if fsdp_gathers(group):
                fsdp_wait(group)
        for module in self._modules:
            module.reshard()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While this lasts, the modules hold the parts; the model must not run."""
        held = [
            (param, fsdp_shown(param))
            for group in self._groups()
            if not fsdp_is_apart(group)
            for param in fsdp_params(group)
        ]
        for param, _ in held:
            fsdp_show(param, fsdp_part(param))
        try:
            yield
        finally:
            for param, shown in held:
                fsdp_show(param, shown)

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            group = fsdp_group(module)
            if group is not None:
                yield group
