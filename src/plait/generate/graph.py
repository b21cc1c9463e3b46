"""One step recorded as a CUDA graph and repeated.

A small model writes a token in less time than Python needs to ask for its kernels. Recorded, they are asked for at
once. What is recorded must read and write the same tensors each time; `Answers.take` and `CachedDecoder.step` do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.ops import record

WARM_UP = 1
"""Steps done before recording: libraries set themselves up in the first one. They count like any other."""


class Recorded:
    """A step, done as it is at first, and repeated from a recording afterwards."""

    def __init__(self, step: Callable[[], None], *, on: bool, is_warm: Callable[[], bool] = lambda: False) -> None:
        """`is_warm` says whether a step like this was done before: then it is recorded at once."""
        self._step, self._on, self._is_warm = step, on, is_warm
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left: int | None = None

    def __call__(self) -> None:
        """Do the step."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self._left is None:
            self._left = 0 if self._is_warm() else WARM_UP
        if not self._on or self._left > 0:
            self._left -= 1
            self._step()
            return
        # Recording does nothing yet; the replay is this step.
        self._graph = record(self._step)
        self._graph.replay()

    def forget(self) -> None:
        """The tensors are others now: record anew."""
        self._graph = self._left = None
