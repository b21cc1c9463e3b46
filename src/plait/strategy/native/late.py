"""Numbers that a device tells later, so that the host need not wait for them.

[Note: one step behind] A device works through a queue, and a host that waits for a number leaves that queue empty.
So a step's numbers are copied to the host behind the step's work, and looked at when the next step is in the queue:
the device always has something to do, and the host is at most one step ahead, which bounds the memory that is in
use for steps under way. Nothing of a step's outcome depends on the delay: whether a step is skipped is decided on
the device itself. What waits one step is what people hear of it: the report of a skipped step, the end of a run that
skipped too many, and a request to stop. fp16 with its loss scale waits in the step, since the next step's loss is
multiplied by what comes of this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Arriving:
    """A few numbers under way from a device to the host. To make one waits for nothing."""

    def __init__(self, numbers: Sequence[Tensor | float], device: torch.device) -> None:
        there = [
            # Filled in on the device: a copy from the host would wait for it.
            one.to(torch.float64)
            if isinstance(one, Tensor)
            else torch.full((), one, dtype=torch.float64, device=device)
            for one in numbers
        ]
        self._host = torch.stack(there).to("cpu", non_blocking=True)  # torch puts such a copy into pinned memory
        self._come = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._come is not None:
            self._come.record()

    def read(self) -> list[float]:
        """The numbers. Waits until they have come, without keeping a core busy."""
        if self._come is not None:
            self._come.synchronize()
        found: list[float] = self._host.tolist()
        return found
