"""The engine behind a prepared model, and one backward pass through several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import RunConfig
from plait.errors import TrainingError
from plait.frontends.accelerate.cutting import with_plan
from plait.strategy import LoopEngine, Preparation, Say, prepare_native
from plait.world import World, restore_rng_state, rng_state


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
    engine = prepare_native(Preparation(config, world, model=model, optimizer=optimizer, say=say), LoopEngine)
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
