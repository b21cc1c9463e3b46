"""The engine of a run that DeepSpeed trains.

[Note: where a correction goes]
ZeRO divides gradients, and their norm, by the loss scale in its step. So for the time of the step the scale is the one
that the gradients were multiplied by, over the correction; and over the number of ranks, since DeepSpeed takes the mean
over ranks of what are parts of a mean already. That also holds on to the scale on the steps that make it grow, where
DeepSpeed would already divide by the next one. Its other optimizers have no such place: there the loss is multiplied by
the number of ranks, and the gradients by the correction.

[Note: how clean steps are counted]
`precision.scaler.window` clean steps double the scale. DeepSpeed 0.19.8 waits for one more after the start and after
each overflow. So the iteration of the last overflow is put one earlier there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.optim import grad_norm
from plait.strategy.foreign.build import Built
from plait.strategy.foreign.engine import ForeignEngine
from plait.strategy.foreign.loss import EvenNormalizer
from plait.strategy.foreign.states import States
from plait.strategy.native.loss import LossNormalizer
from plait.strategy.preparation import Preparation
from plait.torch_internals import foreach_mul_


class DeepSpeedEngine(ForeignEngine):
    """Steps through `deepspeed.initialize`'s engine, which owns backward, reduction, clipping and update."""

    def __init__(self, library_engine: Any, states: States, built: Built, given: Preparation) -> None:
        self._theirs = library_engine
        self._scales = hasattr(self._theirs.optimizer, "override_loss_scale") and self._theirs.zero_optimization()
        normalizer = LossNormalizer if self._scales else EvenNormalizer
        super().__init__(library_engine, states, built, given, normalizer=normalizer)
        moving = self._theirs.fp16_enabled() and self._theirs.dynamic_loss_scale()
        self._moving_scaler = self._theirs.optimizer.loss_scaler if moving else None
        if self._moving_scaler is not None:
            self._moving_scaler.last_overflow_iter -= 1  # see [Note: how clean steps are counted]

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # See [Note: where a correction goes].
        self._theirs.set_gradient_accumulation_boundary(last)
        self._theirs.backward(loss if self._scales else loss * self.world.size, scale_wrt_gas=False)

    def _update(self, correction: float) -> tuple[float, bool]:
        """Step; see [Note: where a correction goes]."""
        if self._scales:
            return self._update_scaled(correction)
        grads = self._whole_gradients()
        if grads is None:
            for part in self._theirs.optimizer.fp32_groups_gradients_flat if correction != 1.0 else ():
                part.mul_(correction)
            self._theirs.step()
            return self._outcome()
        if correction != 1.0:
            foreach_mul_(grads, correction)
        norm = grad_norm(grads)
        skipped = self._guard.enabled and not math.isfinite(norm)
        if skipped:
            self._theirs.zero_grad()
        else:
            self._theirs.step()
        return norm, skipped

    def _update_scaled(self, correction: float) -> tuple[float, bool]:
        wrapper = self._theirs.optimizer
        wrapper.override_loss_scale(wrapper.loss_scale / (correction * self.world.size))
        try:
            self._theirs.step()
        finally:
            wrapper.custom_loss_scaler = False
        norm, skipped = self._outcome()
        if skipped and self._moving_scaler is not None:
            self._moving_scaler.last_overflow_iter -= 1
        return norm, skipped

    def _outcome(self) -> tuple[float, bool]:
        norm = float(self._theirs.get_global_grad_norm())
        return norm, not self._theirs.was_step_applied()

    def _whole_gradients(self) -> list[Tensor] | None:
        """At stage 0, every parameter's gradient; None where DeepSpeed keeps them elsewhere."""
        if self._theirs.zero_optimization():
            return None
        params = [self._params[name] for name in self._built.trained]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return [param.grad for param in params if param.grad is not None]

    # ---- the loss scaler

    def _scaler_state(self) -> dict[str, float] | None:
        if not self._theirs.fp16_enabled():
            return None
        found, moving = {"scale": float(self._theirs.optimizer.loss_scaler.cur_scale)}, self._moving_scaler
        if moving is None:
            return {**found, "clean_steps": 0, "tolerance": 1}
        clean = moving.cur_iter - moving.last_overflow_iter - 2
        return {**found, "clean_steps": clean, "tolerance": moving.cur_hysteresis}

    def _restore_scaler(self, state: Mapping[str, float]) -> None:
        if self._theirs.fp16_enabled():
            self._theirs.optimizer.loss_scaler.cur_scale = float(state["scale"])
        if self._moving_scaler is not None:
            self._moving_scaler.cur_iter, self._moving_scaler.last_overflow_iter = int(state["clean_steps"]), -2
            self._moving_scaler.cur_hysteresis = int(state["tolerance"])
