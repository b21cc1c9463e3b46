"""How training is spread: one interface, several engines."""

from plait.strategy.base import Engine, Evaluation, StepResult
from plait.strategy.factory import prepare_engine
from plait.strategy.native.looping import LoopEngine
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.manual import ManualEngine, prepare_manual
from plait.strategy.native.prepare import prepare_native
from plait.strategy.preparation import Length, Preparation
from plait.strategy.prepare import prepare

__all__ = [
    "Engine",
    "Evaluation",
    "Length",
    "LoopEngine",
    "LossFunction",
    "ManualEngine",
    "Preparation",
    "StepResult",
    "prepare",
    "prepare_engine",
    "prepare_manual",
    "prepare_native",
]
