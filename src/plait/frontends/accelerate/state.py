"""`accelerate.state`: `PartialState`, and `AcceleratorState` as the latest `Accelerator` of this process."""

from __future__ import annotations

import weakref
from typing import Any

from plait.errors import TrainingError
from plait.frontends.accelerate.process import PartialState
from plait.frontends.accelerate.utils.dataclasses import DistributedType

__all__ = ["AcceleratorState", "DistributedType", "PartialState", "is_initialized", "remember"]

# The latest accelerator, for scripts that have no reference to it. Plait itself does not use it.
_LATEST: list[weakref.ref[Any]] = []


def remember(accelerator: Any) -> None:
    """Make `AcceleratorState()` return this accelerator from now on."""
    _LATEST[:] = [weakref.ref(accelerator)]


def is_initialized() -> bool:
    """Whether an `Accelerator` exists in this process."""
    return bool(_LATEST) and _LATEST[0]() is not None


class AcceleratorState:
    """Calling it returns the latest `Accelerator`, which has all attributes of Accelerate's `AcceleratorState`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the accelerator that was created last."""
        if args or kwargs:
            given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            raise TrainingError(f"AcceleratorState({given}) takes no arguments: pass them to the Accelerator")
        if not is_initialized():
            raise TrainingError("AcceleratorState does not exist yet: create an Accelerator first")
        return _LATEST[0]()
