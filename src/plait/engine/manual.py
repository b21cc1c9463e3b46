"""Engines for loops that call the model, backward and step themselves, and compute the loss outside of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.distributed import add_fsdp_roots
from plait.engine.base import StepResult
from plait.engine.loss import StepLoss
from plait.engine.native import NativeEngine
from plait.engine.preparation import Preparation
from plait.engine.prepare import prepare_native
from plait.errors import ConfigError, Problem, TrainingError
from plait.launch import Phase
from plait.precision import LossScaler
from plait.torch_internals import foreach_add_, mark_stepped


class ManualEngine(NativeEngine):
    """The engine of Plait's front ends for other frameworks: the model may be called freely, and any scalar is a loss.

    A loss is this rank's mean over one micro-batch. It is divided by `accumulation`, and gradients are averaged over
    the ranks that read other data, as in DistributedDataParallel: each micro-batch has the same weight, however many
    targets it has. `train_step` weights micro-batches by their number of targets, as in other engines.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: list[Tensor] = []
        self._last_call: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._reduced = False
        self._complete = False
        self._share = 1.0 / self.world.layout.replicas
        self._default_clip_norm = self.updater.clip_norm

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; the user's own object if one was given."""
        return self.updater.optimizer

    @property
    def optimizer_type(self) -> str:
        """The class name of a user's own optimizer; else `optim.type`."""
        optimizer_class = type(self.optimizer)
        return super().optimizer_type if optimizer_class.__module__.startswith("plait.") else optimizer_class.__name__

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; None except in fp16."""
        return self.updater.scaler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in its current mode, with the arguments moved to the device and cast; return its outputs."""
        if self._staged is not None:
            raise TrainingError(
                "a model with strategy.layout.pp cannot be called directly: a pipeline runs several micro-batches at "
                "once; call train_step (DeepSpeed: train_batch)"
            )
        self.on_phase(Phase.FORWARD)
        if not self._forward.plain:
            args, kwargs = self._forward.ready(args), self._forward.ready(kwargs)
        self._last_call = args, kwargs
        if torch.is_grad_enabled():
            return self._forward.call(args, kwargs)
        try:
            return self._forward.call(args, kwargs)
        finally:
            self._unsharded.reshard()

    def allow_submodule_calls(self) -> None:
        """At ZeRO stage 3, make it possible to call submodules directly, and model methods that call them."""
        if hasattr(self.model, "unshard"):
            add_fsdp_roots(self.model, self.master_weights.settle)

    def backward(self, loss: Tensor, *, last: bool | None = None, retain_graph: bool = False) -> None:
        """Run the backward pass of a mean loss over one micro-batch.

        `last`: `step` follows, so gradients are reduced in this backward pass. None: true for every `accumulation`-th
        one.
        """
        if loss.ndim != 0:
            raise TrainingError(
                f"backward needs a scalar loss, not a tensor of shape {tuple(loss.shape)}: take its mean"
            )
        if self._reduced and self._gradients is not None:
            raise TrainingError(
                "backward was called again after the last micro-batch of a step, whose gradients are already summed "
                "over ranks. Add the losses and call backward once, or set the number of micro-batches to accumulate"
            )
        self._complete = False
        self.updater.discard_norm()
        if last is None:
            last = len(self._losses) + 1 >= self.accumulation
        self._losses.append(loss.detach())
        if self._gradients is not None:
            self._gradients.before_backward(last=last)
        self._reduced = last
        self.on_phase(Phase.BACKWARD)
        scaler = self.updater.scaler
        factor = self._share / self.accumulation * (1.0 if scaler is None else scaler.scale)
        # In fp32: an fp16 loss times the loss scale would overflow, though the gradients do not.
        counted = loss.float() * factor if factor != 1.0 else loss
        self._unsharded.expect_backward(counted)
        torch.autograd.backward(counted, retain_graph=retain_graph)

    @property
    def pending(self) -> int:
        """The number of backward passes since the last step."""
        return len(self._losses)

    @property
    def _within_step(self) -> bool:
        return bool(self._losses)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Have the next `step` clip gradients to `max_norm`; return their norm before clipping.

        Gradients are reduced first. The norm is a tensor on the device, as from `torch.nn.utils.clip_grad_norm_`: the
        host waits for it only if it is read.
        """
        self.updater.clip_norm = clip_limit("max_norm", max_norm)
        self._finish_gradients()
        return self.updater.measure_norm()

    def step(self) -> StepResult:
        """Update the weights with the gradients of all backward passes since the last step.

        The loss in the result is this rank's mean.
        """
        if not self._losses:
            raise TrainingError("step was called without a backward pass before it")
        self._finish_gradients()
        # The summed loss is set to zero: whether to skip depends on the norm only, which is the same on all ranks.
        nothing = torch.zeros((), device=self.world.device)
        count = float(len(self._losses) * self.world.layout.replicas)
        losses, self._losses = self._losses, []
        self._reduced = self._complete = False
        mean = torch.stack([loss.float() for loss in losses]).mean()
        result = self._update(StepLoss(nothing, count, False, divisor=None, local_mean=mean))
        self.updater.clip_norm = self._default_clip_norm
        mark_stepped(self.optimizer)
        return result

    def _finish_gradients(self) -> None:
        if not self._complete:
            if not self._reduced and self._gradients is not None:
                raise TrainingError(
                    f"step was called after {len(self._losses)} backward passes, none of which was marked as the last "
                    f"of a step; `accumulation` is {self.accumulation}"
                )
            self._complete_gradients()
        self._complete = True

    def _repeat_forward(self) -> Callable[[], Any]:
        if self._last_call is None:  # by `train_step`
            return super()._repeat_forward()
        args, kwargs = self._last_call
        return lambda: self._forward.call(args, kwargs)


def clip_limit(name: str, limit: float) -> float:
    """Return `limit` as a float; raise `TrainingError` unless it is above 0.

    With a negative limit torch would flip the sign of gradients, and with 0 or NaN erase them.
    """
    if not limit > 0.0:
        raise TrainingError(f"{name}={limit!r}: the clipping limit must be above 0; leave the call out to not clip")
    return float(limit)


def prepare_manual(given: Preparation) -> ManualEngine:
    """Return an engine for a loop that calls forward, backward and step itself; raise `ConfigError` with `cp`."""
    if given.config.strategy.layout.cp > 1:
        raise ConfigError(
            Problem(
                "strategy.layout.cp",
                "shards each sequence, which needs the whole micro-batch at once",
                "Use `train_step`, or leave it out.",
            )
        )
    return prepare_native(given, ManualEngine)


class LoopEngine(ManualEngine):
    """A manual engine for scripts that were written for DistributedDataParallel.

    Such scripts may call backward several times before a step, with a reduction in each; compute one loss from several
    models; or discard gradients. These cases cost extra memory or time only if they occur.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: list[Tensor] = []
        """Reduced gradients of earlier backward passes of this step."""
        self._default_clip_value = self.updater.clip_value

    def begin_backward(self, *, last: bool) -> None:
        """Prepare for one backward pass, which the caller runs; `last`: reduce its gradients, as a step may follow."""
        if self._reduced and self._gradients is not None:
            self._keep()
        if self._gradients is not None:
            self._gradients.before_backward(last=last)
        self._reduced = last
        self._complete = False
        self.updater.discard_norm()

    def end_backward(self, loss: Tensor) -> None:
        """Record the loss of a completed backward pass."""
        self._losses.append(loss)

    def _keep(self) -> None:
        """Copy the reduced gradients aside, so that those of the next backward pass are reduced by themselves."""
        self._finish_gradients()
        self._kept = [grad.clone() for grad in self.master_weights.gather_gradients()]
        self.master_weights.clear_gradients()
        self._complete = False

    def _complete_gradients(self) -> None:
        super()._complete_gradients()
        if self._kept:
            foreach_add_(self.master_weights.gather_gradients(), self._kept)
            self._kept = []

    def discard(self) -> None:
        """Discard the gradients since the last step. Every rank must call it."""
        if self._losses and self._gradients is not None:
            self._gradients.before_backward(last=True)
            self._gradients.finish()
            self._unsharded.refresh()
        self.master_weights.clear_gradients()
        self._kept, self._losses = [], []
        self._reduced = self._complete = False
        self.updater.discard_norm()

    def clip_grad_value(self, value: float) -> None:
        """Have the next `step` clamp each gradient element to [-value, value]."""
        self.updater.clip_value = clip_limit("clip_value", value)

    def step(self) -> StepResult:
        """Update the weights with the gradients of all backward passes since the last step."""
        result = super().step()
        self.updater.clip_value = self._default_clip_value
        return result
