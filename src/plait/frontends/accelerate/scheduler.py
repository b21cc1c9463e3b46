"""`accelerate.scheduler`: the scheduler that `prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.frontends.accelerate.optimizer import PreparedOptimizer
from plait.optim import count_schedule_step, schedule_steps

if TYPE_CHECKING:
    from plait.frontends.accelerate.data_loader import GradientState


class PreparedScheduler:
    """The user's scheduler. Each optimizer step makes `times` scheduler steps: one per rank with batches of its own."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        gradients: GradientState,
        *,
        with_optimizer: bool,
        times: int,
    ) -> None:
        """`times`: scheduler steps per optimizer step."""
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._gradients = gradients
        self._with_optimizer = with_optimizer
        self._times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless gradients accumulate or the optimizer step was skipped by fp16's loss scaling."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradients.sync_gradients:
            if self._gradients.adjust_scheduler and schedule_steps(self.scheduler) is not None:
                count_schedule_step(self.scheduler)
            return
        if any(optimizer.overflowed for optimizer in self.optimizers):
            return
        for _ in range(self._times):
            # OneCycleLR raises after `total_steps`, which steps for an incomplete last round of batches would exceed.
            done = schedule_steps(self.scheduler) or 0
            if done <= getattr(self.scheduler, "total_steps", done):
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.scheduler, name)


AcceleratedScheduler = PreparedScheduler
