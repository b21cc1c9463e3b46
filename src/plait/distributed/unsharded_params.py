"""When the unsharded parameters of FSDP modules are gathered, freed and kept between steps.

`fully_shard` all-gathers parameters when the model runs, and registers them on the modules in place of the shards.
Below ZeRO stage 3 they stay until the last backward pass of a step. The optimizer and checkpoints only use the shards.
Engines use this file also without FSDP, so it does not import `torch.distributed.fsdp`.
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
        """Whether parameters stay unsharded between steps."""

    def keep(self) -> None:
        """Keep parameters unsharded between steps from now on; every rank must call it.

        `state_dict` then returns the full parameters in the compute dtype, and a single rank may call it. Values that
        are written into them are lost with the next optimizer step.
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
        """Make the backward pass of this loss end with FSDP's final callback, which reduces all gradients.

        FSDP queues this callback from hooks on the outputs of the root module. If the loss comes from a submodule that
        was called directly, there are no such hooks, and without this method the gradients would not be reduced.
        """
        state = fsdp_state(self._modules[0]) if self._modules else None
        if state is not None and fsdp_is_root(state) and loss.requires_grad:
            finish = fsdp_register_post_backward_final_callback(state)
            loss.register_hook(lambda _grad: finish())  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        """Call this after the shards have changed: free unsharded parameters; gather them again if they are kept."""
        if not self._modules:
            return
        self._reshard()
        if self.kept:
            for module in self._modules:
                module.unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters that a forward pass without a backward pass leaves, unless they are kept.

        Otherwise the modules would hold them in place of the shards, and the next step would compute with them even if
        the shards have changed since.
        """
        if not self.kept:
            self._reshard()

    def _reshard(self) -> None:
        for group in self._groups():
            # An all-gather that was prefetched for a module that then did not run: if it stayed pending, the next
            # forward pass would use its old values.
            if fsdp_has_all_gather_result(group):
                fsdp_wait_for_unshard(group)
        for module in self._modules:
            module.reshard()

    @contextmanager
    def shards_shown(self) -> Iterator[None]:
        """Return a context in which the modules hold the shards; the model must not run in it."""
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
