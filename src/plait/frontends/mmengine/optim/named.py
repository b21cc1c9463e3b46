"""The wrappers that go with a strategy, and the answer to one that cannot be had."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim.wrapper import BaseOptimWrapper
from plait.frontends.mmengine.registry import OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class DeepSpeedOptimWrapper(BaseOptimWrapper):
    """For `DeepSpeedStrategy`, which says itself how many batches are accumulated and how gradients are clipped."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)

    def accumulate(self, counts: int) -> None:
        """As the strategy's `gradient_accumulation_steps` says."""
        self._counts = counts

    def initialize_count_status(self, model: Any, init_counts: int, max_counts: int) -> None:
        """Count from here on. As in DeepSpeed, batches that are left over at the end update nothing."""
        self._inner_count = init_counts


@OPTIM_WRAPPERS.register_module()
class ColossalAIOptimWrapper(BaseOptimWrapper):
    """For `ColossalAIStrategy`, which says itself in which format is trained."""

    def __init__(self, optimizer: Optimizer, accumulative_counts: int = 1) -> None:
        super().__init__(optimizer, accumulative_counts)


@OPTIM_WRAPPERS.register_module(name="ApexOptimWrapper")
def refuse_apex(**options: Any) -> NoReturn:
    """Apex is over: NVIDIA itself points to torch's own mixed precision."""
    message = "ApexOptimWrapper needs NVIDIA Apex's amp, which is no longer maintained"
    raise ConfigError(Problem("optim_wrapper.type", message, "Write type='AmpOptimWrapper': the same, by torch."))


@OPTIM_WRAPPERS.register_module(name="OptimWrapperDict")
def refuse_several(**options: Any) -> NoReturn:
    """The engine updates the parameters of one model with one optimizer."""
    message = "several optimizers for one model are not trained here"
    remedy = "Use one optimizer with `paramwise_cfg=dict(custom_keys=…)` for different rates."
    raise ConfigError(Problem("optim_wrapper.type", message, remedy))
