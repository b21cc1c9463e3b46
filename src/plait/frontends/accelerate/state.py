"""`accelerate.state`: who this process is, and what the `Accelerator` of this process knows."""

from __future__ import annotations

import weakref
from typing import Any

from plait.errors import TrainingError
from plait.frontends.accelerate.plugins import DistributedType
from plait.frontends.accelerate.process import PartialState

__all__ = ["AcceleratorState", "DistributedType", "PartialState", "is_initialized", "remember"]

# Scripts ask for the state where they have no accelerator at hand. Nothing of Plait itself asks here.
_LATEST: list[weakref.ref[Any]] = []


def remember(accelerator: Any) -> None:
    """Have `AcceleratorState()` answer with this one from now on."""
    _LATEST[:] = [weakref.ref(accelerator)]


def is_initialized() -> bool:
    """Whether there is an `Accelerator`."""
    return bool(_LATEST) and _LATEST[0]() is not None


class AcceleratorState:
    """`AcceleratorState()` is the latest `Accelerator`, which knows all that the state does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The accelerator that was made last."""
        if args or kwargs:
            given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            raise TrainingError(f"AcceleratorState({given}) takes no arguments here: give them to the Accelerator")
        if not is_initialized():
            raise TrainingError("there is no AcceleratorState yet: make an Accelerator first")
        return _LATEST[0]()
