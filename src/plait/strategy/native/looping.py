"""An engine for scripts that call backward whenever they like, and throw gradients away."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.strategy.base import StepResult
from plait.strategy.native.manual import ManualEngine, clip_limit
from plait.torch_internals import foreach_add_


class LoopEngine(ManualEngine):
    """A manual engine for scripts that were written for DistributedDataParallel.

    Such scripts may call backward several times before a step, each time complete; sum one loss over several
    models; or forget about gradients. None of that costs anything where it is not done.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: list[Tensor] = []
        """Gradients of earlier complete backward passes of this step."""
        self._usual_value = self.updater.clip_value

    def begin_backward(self, *, last: bool) -> None:
        """Expect gradients of one backward pass; `last`: complete ones, which a step may follow."""
        if self._reduced and self._gradients is not None:
            self._keep()
        if self._gradients is not None:
            self._gradients.before_backward(last=last)
        self._reduced = last
        self._complete = False
        self.updater.forget_norm()

    def end_backward(self, loss: Tensor) -> None:
        """The backward pass is over."""
        self._losses.append(loss)

    def _keep(self) -> None:
        """Lay the complete gradients aside, so that further ones can be summed over the ranks alone."""
        self._finish_gradients()
        self._kept = [grad.clone() for grad in self.views.gather_gradients()]
        self.views.clear_gradients()
        self._complete = False

    def _complete_gradients(self) -> None:
        super()._complete_gradients()
        if self._kept:
            foreach_add_(self.views.gather_gradients(), self._kept)
            self._kept = []

    def discard(self) -> None:
        """Forget the gradients since the last step. Every rank must do it."""
        if self._losses and self._gradients is not None:
            self._gradients.before_backward(last=True)
            self._gradients.finish()
            self._wholes.renew()
        self.views.clear_gradients()
        self._kept, self._losses = [], []
        self._reduced = self._complete = False
        self.updater.forget_norm()

    def clip_grad_value(self, value: float) -> None:
        """Clip each element in the `step` that follows."""
        self.updater.clip_value = clip_limit("clip_value", value)

    def step(self) -> StepResult:
        """Update the weights with the gradients of all backward passes since the last step."""
        result = super().step()
        self.updater.clip_value = self._usual_value
        return result
