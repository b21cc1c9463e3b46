"""Engines: one interface for an optimizer step, implemented by plain PyTorch and by other libraries; and `prepare`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.engine.base import Engine as Engine
    from plait.engine.base import Evaluation as Evaluation
    from plait.engine.base import Skips as Skips
    from plait.engine.base import SteppingEngine as SteppingEngine
    from plait.engine.base import StepResult as StepResult
    from plait.engine.checkpointing import EngineSaver as EngineSaver
    from plait.engine.checkpointing import FrozenTensors as FrozenTensors
    from plait.engine.checkpointing import naming_state as naming_state
    from plait.engine.checkpointing import resume_engine as resume_engine
    from plait.engine.checkpointing import stored_value as stored_value
    from plait.engine.checkpointing import tensors_of as tensors_of
    from plait.engine.construction import build_module as build_module
    from plait.engine.engines import planned_as as planned_as
    from plait.engine.engines import prepare as prepare
    from plait.engine.engines import prepare_engine as prepare_engine
    from plait.engine.engines import stage_of as stage_of
    from plait.engine.evaluating import evaluate as evaluate
    from plait.engine.foreign import BuiltModel as BuiltModel
    from plait.engine.foreign import build_full_model as build_full_model
    from plait.engine.forward import LogFunction as LogFunction
    from plait.engine.loss import LossFunction as LossFunction
    from plait.engine.loss import LossNormalizer as LossNormalizer
    from plait.engine.loss import WeightedLoss as WeightedLoss
    from plait.engine.loss import configured_loss as configured_loss
    from plait.engine.loss import read_loss as read_loss
    from plait.engine.manual import LoopEngine as LoopEngine
    from plait.engine.manual import ManualEngine as ManualEngine
    from plait.engine.manual import prepare_manual as prepare_manual
    from plait.engine.native import NativeEngine as NativeEngine
    from plait.engine.offload import OffloadedParams as OffloadedParams
    from plait.engine.preparation import Preparation as Preparation
    from plait.engine.preparation import RunLength as RunLength
    from plait.engine.prepare import prepare_native as prepare_native
    from plait.engine.update import AsyncHostCopy as AsyncHostCopy
else:
    from plait.lazy import attach_names

    attach_names(__name__)
