"""How training is spread: one interface, several engines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.strategy.base import Engine as Engine
    from plait.strategy.base import StepResult as StepResult
    from plait.strategy.factory import prepare_engine as prepare_engine
    from plait.strategy.native.building import SMALLER_RANGE as SMALLER_RANGE
    from plait.strategy.native.building import build_module as build_module
    from plait.strategy.native.engine import NativeEngine as NativeEngine
    from plait.strategy.native.forward import Say as Say
    from plait.strategy.native.late import Arriving as Arriving
    from plait.strategy.native.manual import ManualEngine as ManualEngine
    from plait.strategy.native.manual import clip_limit as clip_limit
    from plait.strategy.native.manual import prepare_manual as prepare_manual
    from plait.strategy.native.offloaded import OffloadedViews as OffloadedViews
    from plait.strategy.native.prepare import Length as Length
    from plait.strategy.native.prepare import prepare_native as prepare_native
    from plait.strategy.prepare import prepare as prepare
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "base": ["Engine", "StepResult"],
            "factory": ["prepare_engine"],
            "native.building": ["SMALLER_RANGE", "build_module"],
            "native.engine": ["NativeEngine"],
            "native.forward": ["Say"],
            "native.late": ["Arriving"],
            "native.manual": ["ManualEngine", "clip_limit", "prepare_manual"],
            "native.offloaded": ["OffloadedViews"],
            "native.prepare": ["Length", "prepare_native"],
            "prepare": ["prepare"],
        },
    )
