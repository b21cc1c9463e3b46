"""When unsharded parameters of FSDP modules exist between steps, and who sees them.

`fully_shard` gathers them when the model runs, and puts them in the place of the shards. Below stage 3 they stay until
the last backward pass of a step. Nothing but the shards is updated, saved and loaded. Every engine asks here, also
without FSDP, so this file does not import `torch.distributed.fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from plait.torch_internals import (
    fsdp_has_all_gather_result,
    fsdp_is_root,
    fsdp_is_sharded,
    fsdp_lazy_init,
    fsdp_module_param,
    fsdp_param_group,
    fsdp_params,
    fsdp_register_post_backward_final_callback,
    fsdp_set_module_param,
    fsdp_sharded_param,
    fsdp_state,
    fsdp_state_dict_hooks,
    fsdp_wait_for_unshard,
)
from plait.transformers_internals import generate_alone


class UnshardedParams:
    """The sharded modules of one model, and whether they hold unsharded parameters between steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
        self.kept = False
        """Whether parameters are unsharded between steps, too."""

    def keep(self) -> None:
        """Keep parameters unsharded between steps from now on; every rank must call it.

        `state_dict` then returns them, on any rank alone: what the model computes with, in its dtype. What is written
        into them is lost with the next update.
        """
        if not self._modules:
            return
        self.kept = True
        for module in self._modules:
            fsdp_lazy_init(module)
        for group in self._groups():  # hooks by which `state_dict` returns the shards
            for handle in fsdp_state_dict_hooks(group):
                handle.remove()
        for module in self._model.modules():
            if hasattr(module, "generate"):
                generate_alone(module)
        self.refresh()

    def expect_backward(self, loss: Tensor) -> None:
        """A backward pass begins at this loss: complete the gradients of all modules at its end.

        torch learns of a pass from the outputs of its modules. A loss may come from a module that was called by
        itself, of which torch knows nothing; the gradients would stay where they are, and be lost.
        """
        state = fsdp_state(self._modules[0]) if self._modules else None
        if state is not None and fsdp_is_root(state) and loss.requires_grad:
            finish = fsdp_register_post_backward_final_callback(state)
            loss.register_hook(lambda _grad: finish())  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        """The shards have changed: free what was gathered before, and gather it again where it is kept."""
        if not self._modules:
            return
        self._reshard()
        if self.kept:
            for module in self._modules:
                module.unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters that a forward pass without a backward pass has left, unless they are kept.

        They would hide the shards, and the next step would use them even if the shards have changed since.
        """
        if not self.kept:
            self._reshard()

    def _reshard(self) -> None:
        for group in self._groups():
            # Prefetched for a module that did not come next: it would arrive later, with old values.
            if fsdp_has_all_gather_result(group):
                fsdp_wait_for_unshard(group)
        for module in self._modules:
            module.reshard()

    @contextmanager
    def shards_shown(self) -> Iterator[None]:
        """Until the block ends, the modules hold the shards; the model must not run."""
        unsharded = [
            (param, fsdp_module_param(param))
            for group in self._groups()
            if not fsdp_is_sharded(group)
            for param in fsdp_params(group)
        ]
        for param, _ in unsharded:
            fsdp_set_module_param(param, fsdp_sharded_param(param))
        try:
            yield
        finally:
            for param, shown in unsharded:
                fsdp_set_module_param(param, shown)

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            group = fsdp_param_group(module)
            if group is not None:
                yield group
