"""Numbers of a step that are added over its micro-batches, and over ranks once it is over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Sums:
    """Adds up what micro-batches tell. Nothing waits for the device, and ranks meet once a step."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def note(self, *parts: Tensor | float, device: torch.device) -> None:
        """Take note of one micro-batch: the same numbers in the same order each time."""
        self._seen.append(torch.stack([torch.as_tensor(part).detach().to(device, torch.float64) for part in parts]))

    def finish(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """The sums over the step, on all ranks of a group that saw other data; None where nothing was noted."""
        if not self._seen:
            return None
        sums = torch.stack(self._seen).sum(0)
        self._seen.clear()
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums
