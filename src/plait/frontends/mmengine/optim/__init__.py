"""Optimizers, their wrappers, and schedules of their parameters."""

from plait.frontends.mmengine.optim.constructor import DefaultOptimWrapperConstructor, build_optim_wrapper
from plait.frontends.mmengine.optim.named import ColossalAIOptimWrapper, DeepSpeedOptimWrapper
from plait.frontends.mmengine.optim.optimizers import HybridAdam
from plait.frontends.mmengine.optim.scheduler import ParamScheduler
from plait.frontends.mmengine.optim.schedulers import (
    ConstantLR,
    ConstantMomentum,
    CosineAnnealingLR,
    CosineAnnealingMomentum,
    CosineRestartLR,
    ExponentialLR,
    ExponentialMomentum,
    LinearLR,
    LinearMomentum,
    MultiStepLR,
    MultiStepMomentum,
    OneCycleLR,
    PolyLR,
    PolyMomentum,
    ReduceOnPlateauLR,
    StepLR,
    StepMomentum,
)
from plait.frontends.mmengine.optim.wrapper import AmpOptimWrapper, BaseOptimWrapper, OptimWrapper

__all__ = [
    "AmpOptimWrapper",
    "BaseOptimWrapper",
    "ColossalAIOptimWrapper",
    "ConstantLR",
    "ConstantMomentum",
    "CosineAnnealingLR",
    "CosineAnnealingMomentum",
    "CosineRestartLR",
    "DeepSpeedOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "ExponentialLR",
    "ExponentialMomentum",
    "HybridAdam",
    "LinearLR",
    "LinearMomentum",
    "MultiStepLR",
    "MultiStepMomentum",
    "OneCycleLR",
    "OptimWrapper",
    "ParamScheduler",
    "PolyLR",
    "PolyMomentum",
    "ReduceOnPlateauLR",
    "StepLR",
    "StepMomentum",
    "build_optim_wrapper",
]
