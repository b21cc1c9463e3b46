"""How training is spread: one interface, several engines."""

from plait.strategy.base import Engine, Evaluation, StepResult
from plait.strategy.engines import EngineMaker, prepare_engine
from plait.strategy.evaluating import evaluate
from plait.strategy.foreign.build import Built, build_whole
from plait.strategy.frozen import FrozenPart
from plait.strategy.native.looping import LoopEngine
from plait.strategy.native.loss import LossFunction, LossNormalizer, WeightedLoss, described_loss, read_loss
from plait.strategy.native.manual import ManualEngine, prepare_manual
from plait.strategy.native.prepare import prepare_native
from plait.strategy.preparation import Length, Preparation
from plait.strategy.prepare import prepare
from plait.strategy.saving import resume_engine, stored_value, taken_from, tensors_of
from plait.strategy.skips import Skips
from plait.strategy.stepping import SteppingEngine

__all__ = [
    "Built",
    "Engine",
    "EngineMaker",
    "Evaluation",
    "FrozenPart",
    "Length",
    "LoopEngine",
    "LossFunction",
    "LossNormalizer",
    "ManualEngine",
    "Preparation",
    "Skips",
    "StepResult",
    "SteppingEngine",
    "WeightedLoss",
    "build_whole",
    "described_loss",
    "evaluate",
    "prepare",
    "prepare_engine",
    "prepare_manual",
    "prepare_native",
    "read_loss",
    "resume_engine",
    "stored_value",
    "taken_from",
    "tensors_of",
]
