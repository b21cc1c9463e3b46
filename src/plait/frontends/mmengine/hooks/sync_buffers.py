"""Makes running statistics the same on all ranks."""

from __future__ import annotations

from typing import Any

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """After every epoch. Before a validation and before saving, the runner does so in any case."""

    priority = "NORMAL"

    def after_train_epoch(self, runner: Any) -> None:
        """Average them."""
        runner.engine.agree_on_buffers()
