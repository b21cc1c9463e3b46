"""The engine that a run description names."""

from __future__ import annotations

from typing import Any

from plait.config.run import RunConfig
from plait.strategy.base import Engine
from plait.strategy.engines import make_engine
from plait.strategy.native.building import ModelSource
from plait.strategy.native.forward import Say
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.prepare import Length
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
    return make_engine(
        config,
        world,
        model=model,
        loss_function=loss_function,
        length=length,
        accumulation=accumulation,
        example=example,
        say=say,
    )
