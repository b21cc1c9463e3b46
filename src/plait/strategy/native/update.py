"""From summed gradients to new weights: unscale, guard, clip, step."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.config.train import TrainConfig
from plait.errors import NonFiniteError
from plait.optim import Schedule, clip_by_value, grad_norm, supports_grad_scale
from plait.precision import LossScaler
from plait.strategy.native.views import Views


class Updater:
    """Applies one step's gradients. Every decision is made from numbers that are equal on all ranks."""

    def __init__(
        self,
        views: Views,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        scaler: LossScaler | None,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.skips_in_a_row = 0
        self._views = views
        self._clip_norm = config.clip_norm
        self._clip_value = config.clip_value
        self._guard = config.guard
        self._scale_box = torch.ones((), device=device)
        self._no_inf = torch.zeros((), device=device)
        self._folds_scale = supports_grad_scale(optimizer) and config.clip_value is None

    def apply(self, correction: float, step: int) -> tuple[float, bool]:
        """Update the weights with gradients that are still to be multiplied by `correction`.

        Returns the norm of the corrected gradients and whether the update was left out.
        """
        grads = self._views.gather_gradients()
        factor = correction / self.scaler.scale if self.scaler is not None else correction
        norm = grad_norm(grads, self._views.norm_group) * factor
        finite = math.isfinite(norm)
        if self.scaler is not None:
            self.scaler.update(overflow=not finite)
        if not finite and (self._guard.enabled or self.scaler is not None):
            return norm, True
        if self._clip_norm is not None and norm > self._clip_norm:
            factor *= self._clip_norm / (norm + 1e-6)
        self._step(grads, factor, step)
        return norm, False

    def _step(self, grads: list[Tensor], factor: float, step: int) -> None:
        self.schedule.apply(self.optimizer, step)
        if factor != 1.0 and self._folds_scale:
            # Fused kernels divide each gradient as they read it: no pass over memory of its own.
            self.optimizer.grad_scale = self._scale_box.fill_(1.0 / factor)
            self.optimizer.found_inf = self._no_inf
            self.optimizer.step()
            self.optimizer.grad_scale = self.optimizer.found_inf = None
        else:
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            if self._clip_value is not None:
                clip_by_value(grads, self._clip_value)
            self.optimizer.step()
        self._views.publish()

    def count_skip(self, skipped: bool, blame: str) -> None:
        """Keep count of skipped steps, and stop the run when there are too many in a row."""
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if self.skips_in_a_row >= self._guard.max_skips:
            scale = f", at loss scale {self.scaler.scale:g}" if self.scaler is not None else ""
            raise NonFiniteError(
                f"{self.skips_in_a_row} steps in a row had a non-finite gradient{scale}; first seen in {blame}. "
                "Lower optim.lr, set train.clip_norm, or use precision: bf16 instead of fp16; "
                "train.guard.max_skips sets how many are accepted"
            )
