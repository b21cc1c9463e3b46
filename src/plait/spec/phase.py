"""What a rank is doing right now."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The parts of a run that reports and measurements speak of."""

    BUILD = "build"
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    STEP = "step"
    SAVE = "save"
    EVALUATE = "evaluate"
    IDLE = "idle"
