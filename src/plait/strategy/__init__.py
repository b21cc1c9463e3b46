"""How training is spread: one interface, several engines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.strategy.base import Engine as Engine
    from plait.strategy.base import Evaluation as Evaluation
    from plait.strategy.base import StepResult as StepResult
    from plait.strategy.engines import planned_as as planned_as
    from plait.strategy.engines import prepare_engine as prepare_engine
    from plait.strategy.engines import stage_of as stage_of
    from plait.strategy.evaluating import evaluate as evaluate
    from plait.strategy.foreign.build import Built as Built
    from plait.strategy.foreign.build import build_whole as build_whole
    from plait.strategy.frozen import FrozenPart as FrozenPart
    from plait.strategy.native.building import build_module as build_module
    from plait.strategy.native.engine import NativeEngine as NativeEngine
    from plait.strategy.native.forward import Say as Say
    from plait.strategy.native.late import Arriving as Arriving
    from plait.strategy.native.looping import LoopEngine as LoopEngine
    from plait.strategy.native.loss import LossFunction as LossFunction
    from plait.strategy.native.loss import LossNormalizer as LossNormalizer
    from plait.strategy.native.loss import WeightedLoss as WeightedLoss
    from plait.strategy.native.loss import described_loss as described_loss
    from plait.strategy.native.loss import read_loss as read_loss
    from plait.strategy.native.manual import ManualEngine as ManualEngine
    from plait.strategy.native.manual import prepare_manual as prepare_manual
    from plait.strategy.native.offloaded import OffloadedViews as OffloadedViews
    from plait.strategy.native.prepare import prepare_native as prepare_native
    from plait.strategy.preparation import Length as Length
    from plait.strategy.preparation import Preparation as Preparation
    from plait.strategy.prepare import prepare as prepare
    from plait.strategy.saving import resume_engine as resume_engine
    from plait.strategy.saving import stored_value as stored_value
    from plait.strategy.saving import taken_from as taken_from
    from plait.strategy.saving import tensors_of as tensors_of
    from plait.strategy.skips import Skips as Skips
    from plait.strategy.stepping import SteppingEngine as SteppingEngine
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "base": ["Engine", "Evaluation", "StepResult"],
            "engines": ["planned_as", "prepare_engine", "stage_of"],
            "evaluating": ["evaluate"],
            "foreign.build": ["Built", "build_whole"],
            "frozen": ["FrozenPart"],
            "native.building": ["build_module"],
            "native.engine": ["NativeEngine"],
            "native.forward": ["Say"],
            "native.late": ["Arriving"],
            "native.looping": ["LoopEngine"],
            "native.loss": ["LossFunction", "LossNormalizer", "WeightedLoss", "described_loss", "read_loss"],
            "native.manual": ["ManualEngine", "prepare_manual"],
            "native.offloaded": ["OffloadedViews"],
            "native.prepare": ["prepare_native"],
            "preparation": ["Length", "Preparation"],
            "prepare": ["prepare"],
            "saving": ["resume_engine", "stored_value", "taken_from", "tensors_of"],
            "skips": ["Skips"],
            "stepping": ["SteppingEngine"],
        },
    )
