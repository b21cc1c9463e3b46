"""The engine of a run that ColossalAI trains."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from plait.config import RunConfig
from plait.optim import grad_norm
from plait.strategy.foreign.build import Built
from plait.strategy.foreign.engine import ForeignEngine
from plait.strategy.foreign.loss import EvenNormalizer, StepNormalizer
from plait.strategy.foreign.states import States
from plait.torch_internals import foreach_mul_
from plait.world import World


class ColossalEngine(ForeignEngine):
    """Steps through a `Booster`: its backward, its reduction, its update."""

    def __init__(
        self,
        booster: Any,
        boosted: Any,
        wrapper: Any,
        states: States,
        built: Built,
        world: World,
        config: RunConfig,
        **options: Any,
    ) -> None:
        """`boosted` and `wrapper` are what `booster` made of the model and its optimizer."""
        self._booster = booster
        self._boosted = boosted
        self._wrapper = wrapper
        self._plugin = config.strategy.plugin
        self._stage = config.strategy.stage
        self._clip_norm = config.train.clip_norm
        normalizer = StepNormalizer if self._plugin == "gemini" else EvenNormalizer
        super().__init__(boosted, states, built, world, config, normalizer=normalizer, **options)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # It takes the mean over ranks, and the loss is this rank's part of a mean over all of them already.
        with self._without_reduction() if not last else nullcontext():
            self._booster.backward(loss * self.world.size, self._wrapper)

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Where gradients are reduced with the last micro-batch only; stages 2 and 3 reduce each."""
        if self._stage >= 2:
            return nullcontext()
        context: AbstractContextManager[Any] = self._booster.no_sync(self._boosted, self._wrapper)
        return context

    def _update(self, correction: float) -> tuple[float, bool]:
        if self._plugin == "gemini":
            assert math.isclose(correction, 1.0, rel_tol=1e-6), "StepNormalizer leaves nothing to correct"
            return self._update_chunks()
        grads = self._gradients()
        if correction != 1.0:
            foreach_mul_(grads, correction)
        spread = self._plugin == "torch_fsdp" or hasattr(self._wrapper, "pg_to_grad_store")
        norm = grad_norm([grad.float() for grad in grads], self.world.everyone if spread else None)
        skipped = self._guard.enabled and not math.isfinite(norm)
        if not skipped:
            if self._plugin in ("torch_ddp", "torch_fsdp") and self._clip_norm is not None and norm > self._clip_norm:
                foreach_mul_(grads, self._clip_norm / (norm + 1e-6))
            self._wrapper.step()
        self._wrapper.zero_grad()
        return norm, skipped

    def _update_chunks(self) -> tuple[float, bool]:
        """Gemini reduces, measures and clips in one."""
        self._wrapper.step()
        norm = self._wrapper.get_grad_norm()
        self._wrapper.zero_grad()
        return math.nan if norm is None else float(norm), False

    def _gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, where it has one."""
        stores = getattr(self._wrapper, "pg_to_grad_store", None)
        if stores is None:
            params = (self._params[name] for name in self._built.trained)
            return [param.grad for param in params if param.grad is not None]
        groups = range(self._wrapper.num_param_groups)
        return [
            grad
            for store in stores.values()
            for group in groups
            for grad in store.get_working_grads_by_group_id(group)
            if grad is not None
        ]
