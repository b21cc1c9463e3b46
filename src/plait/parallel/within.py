"""Backward passes within a forward pass of a sharded model: for a penalty on gradients, or for inputs that deceive.

[Note: a pass within a pass] After a backward pass `fully_shard` lets go of what was gathered, and reduces gradients. A
model may go backwards while it goes forwards, to learn how its answer depends on its inputs. Then the forward pass goes
on with weights that are gone; and what such a pass has itself recorded (`create_graph`) needs them once more in the
pass that counts. So a pass within leaves everything as it is, and the one that counts cleans up for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from plait.torch_internals import (
    fsdp_around_backward,
    fsdp_around_reduction,
    fsdp_begin_anew,
    fsdp_goes_forward,
    fsdp_groups,
    fsdp_state,
)


def allow_passes_within(modules: Sequence[FSDPModule]) -> None:
    """Let a model that consists of these sharded modules go backwards before its own backward pass."""
    passes = _Passes()
    for module in modules:
        passes.watch(fsdp_state(module))


class _Passes:
    """Knows which backward pass is under way."""

    def __init__(self) -> None:
        self._within = False

    def watch(self, state: Any) -> None:
        """Tell the passes through one sharded module apart."""

        def begin(pre_backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def begun(grad: Tensor) -> Tensor:
                # A pass that is recorded will be gone through.
                self._within = fsdp_goes_forward(state) or torch.is_grad_enabled()
                return pre_backward(grad)

            return begun

        def end(finish: Callable[[], None]) -> Callable[[], None]:
            return lambda: fsdp_begin_anew(state) if self._within else finish()

        fsdp_around_backward(state, begin, end)
        for group in fsdp_groups(state):
            self._watch_group(group)

    def _watch_group(self, group: Any) -> None:
        def around(post_backward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: None if self._within else post_backward(*args)

        fsdp_around_reduction(group, around)
