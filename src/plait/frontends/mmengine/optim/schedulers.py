"""The schedules by name, each for the learning rate and most for the momentum."""

from __future__ import annotations

from typing import Any, TypeVar

from plait.frontends.mmengine.optim.curves import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    StepParamScheduler,
)
from plait.frontends.mmengine.optim.cycles import (
    CosineRestartParamScheduler,
    OneCycleParamScheduler,
    ReduceOnPlateauParamScheduler,
)
from plait.frontends.mmengine.optim.scheduler import ParamScheduler
from plait.frontends.mmengine.registry import PARAM_SCHEDULERS

S = TypeVar("S", bound=ParamScheduler)


def _of(kind: type[S], param: str, name: str) -> type[S]:
    """A schedule that knows which parameter it sets."""

    def start(self: S, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, optimizer, param, *args, **kwargs)

    named = {"__init__": start, "__module__": __name__, "__doc__": kind.__doc__, "fixed": ("param_name",)}
    made = type(name, (kind,), named)
    PARAM_SCHEDULERS.register_module(name=name, module=made)
    return made


for _kind in (
    ConstantParamScheduler,
    LinearParamScheduler,
    ExponentialParamScheduler,
    StepParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    OneCycleParamScheduler,
    ReduceOnPlateauParamScheduler,
):
    PARAM_SCHEDULERS.register_module(module=_kind)

ConstantLR = _of(ConstantParamScheduler, "lr", "ConstantLR")
ConstantMomentum = _of(ConstantParamScheduler, "momentum", "ConstantMomentum")
LinearLR = _of(LinearParamScheduler, "lr", "LinearLR")
LinearMomentum = _of(LinearParamScheduler, "momentum", "LinearMomentum")
ExponentialLR = _of(ExponentialParamScheduler, "lr", "ExponentialLR")
ExponentialMomentum = _of(ExponentialParamScheduler, "momentum", "ExponentialMomentum")
StepLR = _of(StepParamScheduler, "lr", "StepLR")
StepMomentum = _of(StepParamScheduler, "momentum", "StepMomentum")
MultiStepLR = _of(MultiStepParamScheduler, "lr", "MultiStepLR")
MultiStepMomentum = _of(MultiStepParamScheduler, "momentum", "MultiStepMomentum")
PolyLR = _of(PolyParamScheduler, "lr", "PolyLR")
PolyMomentum = _of(PolyParamScheduler, "momentum", "PolyMomentum")
CosineAnnealingLR = _of(CosineAnnealingParamScheduler, "lr", "CosineAnnealingLR")
CosineAnnealingMomentum = _of(CosineAnnealingParamScheduler, "momentum", "CosineAnnealingMomentum")
CosineRestartLR = _of(CosineRestartParamScheduler, "lr", "CosineRestartLR")
OneCycleLR = _of(OneCycleParamScheduler, "lr", "OneCycleLR")
ReduceOnPlateauLR = _of(ReduceOnPlateauParamScheduler, "lr", "ReduceOnPlateauLR")
