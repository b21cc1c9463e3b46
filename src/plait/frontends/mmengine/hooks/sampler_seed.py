"""Another order of samples in every epoch."""

from __future__ import annotations

from typing import Any

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tells the sampler which epoch it is."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Any) -> None:
        """Set the epoch of the sampler, or of the sampler inside a batch sampler."""
        set_epoch(runner.train_loop.dataloader, runner.epoch)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell whichever sampler of a loader wants to know."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for sampler in (getattr(loader, "sampler", None), inner):
        if (tell := getattr(sampler, "set_epoch", None)) is not None:
            tell(epoch)
            return
