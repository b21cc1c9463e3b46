"""Does a device wait for Python? Found out on the way, without waiting for the device."""

from __future__ import annotations

import torch
from torch import nn

from plait.torch_internals import is_hooked

AT_FIRST = 3
"""Steps that show nothing: kernels are chosen, built and loaded in those."""
LOOKS = 8
"""Steps in a row after which the device must have had nothing left to do."""
ROOM = 0.4
"""Of the device's memory, what a run may have taken: recorded passes keep as much for themselves."""


class Starving:
    """Looks at the first steps: was the device done with a step's passes when the host came with the next step?

    A device that is busy is about a step behind its host. One that waits for Python, or for data, is not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._mark: torch.cuda.Event | None = None
        self.found: bool | None = None
        """None as long as it is not known."""

    def passes_begin(self) -> None:
        """Look whether the device is done with those before."""
        if self.found is not None:
            return
        self._steps += 1
        if self._mark is not None and self._steps > AT_FIRST + 1:
            if not self._mark.query():  # type: ignore[no-untyped-call]
                self.found = False
            elif self._steps > AT_FIRST + LOOKS:
                self.found = self._has_room()

    def passes_end(self) -> None:
        """Both were asked for."""
        if self.found is None:
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._mark.record(torch.cuda.current_stream(self._device))

    def _has_room(self) -> bool:
        return torch.cuda.max_memory_reserved(self._device) < ROOM * torch.cuda.mem_get_info(self._device)[1]


def is_watched(modules: list[nn.Module]) -> bool:
    """Whether somebody wants to be told of passes, as no recording would."""
    return any(map(is_hooked, modules))
