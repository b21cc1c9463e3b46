"""How training is spread: one interface, several engines."""

from plait.strategy.base import Engine, Evaluation, StepResult
from plait.strategy.evaluating import evaluate
from plait.strategy.factory import prepare_engine
from plait.strategy.frozen import FrozenPart
from plait.strategy.native.looping import LoopEngine
from plait.strategy.native.loss import described_loss
from plait.strategy.native.manual import ManualEngine, prepare_manual
from plait.strategy.native.prepare import prepare_native
from plait.strategy.preparation import Length, Preparation
from plait.strategy.prepare import prepare
from plait.strategy.saving import resume_engine, stored_value, taken_from, tensors_of

__all__ = [
    "Engine",
    "Evaluation",
    "FrozenPart",
    "Length",
    "LoopEngine",
    "ManualEngine",
    "Preparation",
    "StepResult",
    "described_loss",
    "evaluate",
    "prepare",
    "prepare_engine",
    "prepare_manual",
    "prepare_native",
    "resume_engine",
    "stored_value",
    "taken_from",
    "tensors_of",
]
