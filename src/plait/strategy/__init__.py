"""How training is spread: one interface, several engines."""

from plait.strategy.base import Engine, Evaluation, StepResult
from plait.strategy.native.prepare import Length, prepare_native
from plait.strategy.prepare import prepare

__all__ = ["Engine", "Evaluation", "Length", "StepResult", "prepare", "prepare_native"]
