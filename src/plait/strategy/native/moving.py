"""Bringing inputs to the device.

[Note: copies on a line of their own] The host is a step ahead of the device. A copy in the line of the device's work
would begin when that work is done; on a line of its own it begins at once, and a batch has come before the device asks
for it. A copy from memory that is not pinned makes the host wait for the line that it is in; this one is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Mover:
    """Brings whatever a batch is made of to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._line = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, value: Any) -> Any:
        """The same structure with every tensor on the device."""
        moved: list[Tensor] = []
        found = self._move(value, moved)
        if moved and self._line is not None:
            work = torch.cuda.current_stream(self._device)
            work.wait_stream(self._line)
            for tensor in moved:
                tensor.record_stream(work)  # it was made on the other line, which must not use its memory again yet
        return found

    def _move(self, value: Any, moved: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value, moved)
        if isinstance(value, Mapping):
            return {key: self._move(item, moved) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._move(item, moved) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._move(item, moved) for item in value)
        return value

    def _copy(self, tensor: Tensor, moved: list[Tensor]) -> Tensor:
        if self._line is None or tensor.device.type != "cpu":
            return tensor.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._line):
            copy = tensor.to(self._device, non_blocking=True)
        moved.append(copy)
        return copy
