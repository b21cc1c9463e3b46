"""How training is spread: one interface, several engines."""

from plait.strategy.base import Engine, Evaluation, StepResult
from plait.strategy.engines import EngineMaker
from plait.strategy.factory import prepare_engine
from plait.strategy.foreign.build import Built, build_whole
from plait.strategy.native.loss import LossNormalizer, WeightedLoss, read_loss
from plait.strategy.native.manual import ManualEngine, prepare_manual
from plait.strategy.native.prepare import Length, prepare_native
from plait.strategy.prepare import prepare
from plait.strategy.skips import Skips
from plait.strategy.stepping import SteppingEngine

__all__ = [
    "Built",
    "Engine",
    "EngineMaker",
    "Evaluation",
    "Length",
    "LossNormalizer",
    "ManualEngine",
    "Skips",
    "StepResult",
    "SteppingEngine",
    "WeightedLoss",
    "build_whole",
    "prepare",
    "prepare_engine",
    "prepare_manual",
    "prepare_native",
    "read_loss",
]
