"""From summed gradients to new weights: unscale, guard, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.config import TrainConfig
from plait.errors import ConfigError, Problem
from plait.optim import (
    OnePassAdam,
    OwnRates,
    Record,
    Schedule,
    bare_step,
    clip_by_value,
    grad_norm,
    has_two_modes,
    part_norms,
    supports_grad_scale,
    whole_norm,
)
from plait.precision import LossScaler
from plait.strategy.base import Numbers, StepResult
from plait.strategy.native.late import Arriving
from plait.strategy.native.loss import Sums
from plait.strategy.native.views import Views
from plait.strategy.skips import Skips
from plait.torch_internals import foreach_mul_


class Updater:
    """Applies one step's gradients. Every decision is made from numbers that are equal on all ranks."""

    def __init__(
        self,
        views: Views,
        optimizer: Optimizer,
        schedule: Schedule | OwnRates,
        *,
        scaler: LossScaler | None,
        config: TrainConfig,
        device: torch.device,
        planned: bool = False,
    ) -> None:
        """`planned`: tensors have no values, and nothing may look at any."""
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.skips = Skips(config.guard)
        self._views = views
        self.clip_norm = config.clip_norm
        self.clip_value = config.clip_value
        self._device = device
        self._fused = supports_grad_scale(optimizer)
        self.stays_on_device = device.type == "cuda"
        """Whether a step is decided by the device itself where the optimizer can, so that the host need not wait."""
        self._skips = config.guard.enabled or scaler is not None
        self._bare_step = bare_step(optimizer)
        self._publishes = isinstance(optimizer, OnePassAdam) and optimizer.publishes
        self.numbers = Record(optimizer)
        """What the optimizer keeps besides tensors."""
        if isinstance(schedule, Schedule) and schedule.moves_momentum:
            self.numbers.scheduled = frozenset({"betas", "momentum"})
        self._planned = planned
        self._two_modes = has_two_modes(optimizer)
        self._evaluating = False
        self.train()
        self._weights: Tensor | None = None
        self._measured: Tensor | float | None = None
        """The norm of this step's gradients, scaled as they are, where it was asked for already; on the device, where
        that decides."""
        self.updated: bool | Tensor = True
        """Whether the latest step changed the weights; on the device, where that decided it."""
        self.norms: Tensor | None = None
        """The norm of each of its gradients, where the device has them."""

    @property
    def _folds_scale(self) -> bool:
        """Whether the optimizer scales gradients as it reads them. Clipping by value comes between the two."""
        return self._fused and self.clip_value is None

    @property
    def _device_decides(self) -> bool:
        return self.stays_on_device and self._folds_scale

    def train(self) -> None:
        """Have the optimizer show the weights that it trains, where it has others to use."""
        if self._two_modes:
            self._evaluating = False
            self._switch("train")

    def _switch(self, mode: str) -> None:
        with torch.no_grad(), self._views.in_place():
            getattr(self.optimizer, mode)()
        self._views.publish()

    @contextmanager
    def weights_to_use(self) -> Iterator[bool]:
        """While this lasts, the model has the weights to evaluate and save, where the optimizer tells them apart.

        Says whether that changed anything. Every rank must enter it.
        """
        changes = self._two_modes and not self._evaluating
        if not changes:
            yield False
            return
        self._evaluating = True
        self._switch("eval")
        try:
            yield True
        finally:
            if self._evaluating:  # else a checkpoint was taken up meanwhile
                self.train()

    def measure_norm(self) -> Tensor:
        """The norm of the step's gradients, unscaled; they must be complete.

        On the device, and nobody waits for it where the device decides what becomes of the step.
        """
        grads = self._views.gather_gradients()
        scale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        if self._device_decides:
            self._measured = self._norm_on_device(grads)
            return (self._measured * scale).float()
        self._measured = self._norm(grads)
        return torch.full((), self._measured * scale, dtype=torch.float32, device=self._device)

    def forget_norm(self) -> None:
        """The gradients have changed since it was measured."""
        self._measured = None

    def apply(self, sums: Sums, step: int) -> StepResult:
        """Update the weights with the gradients of a step whose loss adds up to `sums`."""
        grads = self._views.gather_gradients()
        lr = self.schedule.apply(self.optimizer, step)
        scale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        if self._device_decides:
            result = self._apply_on_device(grads, sums, scale, lr)
        else:
            result = self._apply_on_host(grads, sums, scale, lr)
        self._measured = None
        if self.scaler is not None:
            self.scaler.update(overflow=result.skipped)
        return result

    def _apply_on_host(self, grads: list[Tensor], sums: Sums, scale: float, lr: float) -> StepResult:
        """The host looks at the norm, decides, and updates."""
        loss, targets, stop = sums.read()
        factor = scale if sums.divisor is None else scale * sums.divisor / (targets or 1.0)
        norm = (self._norm(grads) if self._measured is None else float(self._measured)) * factor
        skipped = self._skips and not (math.isfinite(norm) and (sums.own is not None or math.isfinite(loss)))
        if not skipped:
            self._apply(grads, norm, factor)
        self.updated, self.norms = not skipped, None
        return StepResult(loss, norm, skipped, lr, targets, stop)

    def _norm(self, grads: list[Tensor]) -> float:
        return grad_norm(grads, self._views.norm_group, self._views.norm_weights)

    def _clipped(self, norm: float, factor: float) -> float:
        """The factor of all gradients, clipping included."""
        if self.clip_norm is not None and norm > self.clip_norm:
            return factor * (self.clip_norm / (norm + 1e-6))
        return factor

    def _apply(self, grads: list[Tensor], norm: float, factor: float) -> None:
        factor = self._clipped(norm, factor)
        if self._folds_scale:
            self._step(None if factor == 1.0 else torch.full((), 1.0 / factor, device=self._device), None)
            return
        if factor != 1.0:
            foreach_mul_(grads, factor)
        if self.clip_value is not None:
            clip_by_value(grads, self.clip_value)
        self._update()

    def _apply_on_device(self, grads: list[Tensor], sums: Sums, factor: Tensor | float, lr: float) -> StepResult:
        """The same without waiting for the device: the kernel itself skips an update. [Note: one step behind]"""
        skips, measured = self._skips, self._measured
        factor = factor * sums.correction()
        norm = (measured if isinstance(measured, Tensor) else self._norm_on_device(grads)) * factor
        finite = norm.isfinite() & sums.total.isfinite()
        if self.clip_norm is not None:
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = None
        if isinstance(factor, Tensor):
            scale = (1.0 / factor).float()
        elif factor != 1.0:
            scale = torch.full((), 1.0 / factor, device=self._device)
        self._step(scale, (~finite).float() if skips else None)
        self.updated = finite if skips else True
        arriving = Arriving((sums.mean(), norm, finite, sums.count, sums.flag), self._device)

        def read() -> Numbers:
            loss, norm, finite, targets, stop = arriving.read()
            return loss, norm, skips and not finite, targets, bool(stop)

        if self.scaler is None:
            return StepResult.on_its_way(lr, read)
        loss, found, skipped, targets, stop = read()  # the scale of the next step depends on it
        return StepResult(loss, found, skipped, lr, targets, stop)

    def _norm_on_device(self, grads: list[Tensor]) -> Tensor:
        self.norms = part_norms(grads, self._device)
        return whole_norm(self.norms, self._views.norm_group, self._norm_weights())

    def _norm_weights(self) -> Tensor | None:
        """How much each norm counts, on the device: taken there once."""
        if self._weights is None and self._views.norm_weights is not None:
            self._weights = torch.tensor(self._views.norm_weights, dtype=torch.float64, device=self._device)
        return self._weights

    def _step(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step a fused optimizer, which divides each gradient by `scale` as it reads it: no pass of its own."""
        optimizer: Any = self.optimizer
        if scale is not None and found_inf is None:
            found_inf = torch.zeros((), device=self._device)
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        self._update()
        optimizer.grad_scale = optimizer.found_inf = None

    def _update(self) -> None:
        with torch.no_grad(), self._views.in_place(gradients=True):
            try:
                self._bare_step()
            except (ArithmeticError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                if not self._planned:
                    raise
                kind = type(self.optimizer).__name__
                reason = f"{kind} cannot be planned: its step needs values ({type(error).__name__}: {error})"
                remedy = "Train without a plan: `plan: off`."
                raise ConfigError(Problem("optim.type", reason.replace("\n", " "), remedy)) from error
        if not self._publishes:
            self._views.publish()
