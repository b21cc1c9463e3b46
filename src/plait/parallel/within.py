"""Backward passes within a forward pass of a sharded model: for a penalty on gradients, or for inputs that deceive.

[Note: a pass within a pass] After a backward pass `fully_shard` lets go of what was gathered, and reduces gradients. A
model may go backwards while it goes forwards, to learn how its answer depends on its inputs. Then the forward pass goes
on with weights that are gone; and what such a pass has itself recorded (`create_graph`) needs them once more in the
pass that counts. So a pass within leaves everything as it is, and the one that counts cleans up for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def allow_passes_within(modules: Sequence[FSDPModule]) -> None:
    """Let a model that consists of these sharded modules go backwards before its own backward pass."""
    passes = _Passes()
    for module in modules:
        passes.watch(module._get_fsdp_state())


class _Passes:
    """Knows which backward pass is under way."""

    def __init__(self) -> None:
        self._within = False

    def watch(self, state: Any) -> None:
        """Tell the passes through one sharded module apart."""
        pre_backward, finish = state._pre_backward, state._root_post_backward_final_callback

        def begin(grad: torch.Tensor) -> torch.Tensor:
            going_forward = state._state_ctx.iter_forward_root is not None
            self._within = going_forward or torch.is_grad_enabled()  # a pass that is recorded will be gone through
            found: torch.Tensor = pre_backward(grad)
            return found

        state._pre_backward = begin
        state._root_post_backward_final_callback = lambda: _pause(state) if self._within else finish()
        for group in state._fsdp_param_groups:
            self._watch_group(group)

    def _watch_group(self, group: Any) -> None:
        post_backward = group.post_backward
        group.post_backward = lambda *args: None if self._within else post_backward(*args)


def _pause(root: Any) -> None:
    """End a pass within: those that follow begin anew, and nothing that was gathered goes."""
    for state in root._state_ctx.all_states:
        for part in (state, *state._fsdp_param_groups):
            if part._training_state.name == "PRE_BACKWARD":
                part._training_state = type(part._training_state).IDLE
    root._state_ctx.post_backward_final_callback_queued = False
