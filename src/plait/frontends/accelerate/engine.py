"""The engine behind a prepared model: backward whenever the script likes, and gradients that can be thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import RunConfig
from plait.errors import TrainingError
from plait.frontends.accelerate.cutting import with_plan
from plait.strategy import ManualEngine, Say, StepResult, clip_limit, prepare_native
from plait.torch_internals import foreach_add_
from plait.world import World, restore_rng_state, rng_state


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


def backward(engines: Sequence[LoopEngine], loss: Tensor, *, last: Sequence[bool], **kwargs: Any) -> None:
    """One backward pass through a loss to which several models may have contributed.

    The loss is this rank's mean over a micro-batch; `last` says of each engine whether a step may follow.
    """
    if loss.ndim != 0:
        raise TrainingError(f"backward wants a scalar loss, not a tensor of shape {tuple(loss.shape)}: take its mean")
    scales = {1.0 if engine.scaler is None else engine.scaler.scale for engine in engines}
    if len(scales) > 1:
        raise TrainingError(
            "the loss comes from several models whose fp16 loss scales differ by now: give them one optimizer, or "
            "use mixed_precision='bf16'"
        )
    for engine, is_last in zip(engines, last, strict=True):
        engine.begin_backward(last=is_last)
    first = engines[0]
    factor = scales.pop() / (first.accumulation * first.world.layout.replicas)
    # In fp32: a scaled fp16 loss would overflow before any gradient does.
    torch.autograd.backward(loss.float() * factor if factor != 1.0 else loss, **kwargs)
    for engine in engines:
        engine.end_backward(loss.detach())


def build_engine(
    config: RunConfig,
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    say: Say,
    *,
    whole_vocabulary: bool = True,
) -> LoopEngine:
    """Spread a model and adopt its optimizer. Random numbers go on as if nothing had happened.

    `whole_vocabulary`: see `with_plan`.
    """
    state = rng_state(world.device)
    config = with_plan(config, model, whole_vocabulary=whole_vocabulary)
    engine = prepare_native(config, world, model=model, optimizer=optimizer, engine=LoopEngine, say=say)
    assert isinstance(engine, LoopEngine)
    if config.strategy.stage < 3:
        engine.keep_wholes()  # as replicas have them: the main process may save or ask the model by itself
    restore_rng_state(state, world.device)
    return engine


class Joint(nn.Module):
    """Models that one optimizer updates, as one; a call names which of them it means."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """What one of the models says."""
        return self.models[index](*args, **kwargs)
