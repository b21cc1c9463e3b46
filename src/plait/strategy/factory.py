"""The engine that a run description names."""

from __future__ import annotations

from typing import Any

from plait.config import RunConfig
from plait.strategy.base import Engine
from plait.strategy.native.building import ModelSource
from plait.strategy.native.forward import Say
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.prepare import Length, prepare_native
from plait.world import World


def prepare_engine(
    config: RunConfig,
    world: World,
    *,
    model: ModelSource = None,
    loss_function: LossFunction | None = None,
    length: Length | None = None,
    accumulation: int = 1,
    example: Any = None,
    say: Say = print,
) -> Engine:
    """Make a model ready to train with `strategy.engine`; see `prepare_native`. No other library is loaded."""
    given: dict[str, Any] = {
        "model": model,
        "loss_function": loss_function,
        "length": length,
        "accumulation": accumulation,
        "example": example,
        "say": say,
    }
    match config.strategy.engine:
        case "deepspeed":
            from plait.strategy.deepspeed import prepare_deepspeed

            return prepare_deepspeed(config, world, **given)
        case "colossalai":
            from plait.strategy.colossalai import prepare_colossalai

            return prepare_colossalai(config, world, **given)
        case _:
            return prepare_native(config, world, **given)
