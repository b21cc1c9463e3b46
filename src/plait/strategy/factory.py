"""The engine that a run description names."""

from __future__ import annotations

from plait.strategy.base import Engine
from plait.strategy.native.prepare import prepare_native
from plait.strategy.preparation import Preparation


def prepare_engine(given: Preparation) -> Engine:
    """Make a model ready to train with `strategy.engine`. No other library is loaded."""
    match given.config.strategy.engine:
        case "deepspeed":
            from plait.strategy.deepspeed import prepare_deepspeed

            return prepare_deepspeed(given)
        case "colossalai":
            from plait.strategy.colossalai import prepare_colossalai

            return prepare_colossalai(given)
        case _:
            return prepare_native(given)
