"""What a rank is doing."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The phases of a run, in the order in which they come."""

    BUILD = "build"
    """The model is made, spread and given its values."""
    LOAD = "load"
    """A checkpoint is read."""
    INIT = "optimizer init"
    """The first update, in which an optimizer makes its state. Only a plan tells it from `step`."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """Gradients of all ranks are brought together, as far as the backward pass has not done it."""
    STEP = "step"
    """The optimizer updates the weights."""
    SAVE = "save"
    EVALUATE = "evaluate"
    IDLE = "idle"
    """Between all of these: data, logs, hooks."""
    LEFT = "left"
    """It was told to stop, has saved, and goes. What its exit code says is no failure."""

    @property
    def has_batches(self) -> bool:
        """Whether it works on micro-batches: smaller ones help where memory is short in it."""
        return self in (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP, Phase.EVALUATE)
