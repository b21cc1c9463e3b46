"""One step recorded as a CUDA graph and repeated.

A small model writes a token in less time than Python needs to ask for its kernels. Recorded, they are asked for at
once. What is recorded must read and write the same tensors each time; `Answers.take` and `CachedDecoder.step` do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP = 3
"""Steps done before recording: libraries set themselves up in the first ones. They count like any other."""


class Recorded:
    """A step, done as it is at first, and repeated from a recording afterwards."""

    def __init__(self, step: Callable[[], None], *, on: bool) -> None:
        self._step = step
        self._on = on
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = 0

    def __call__(self) -> None:
        """Do the step."""
        if self._graph is not None:
            self._graph.replay()
            return
        if not self._on or self._done < WARM_UP:
            self._done += 1
            self._step()
            return
        graph = torch.cuda.CUDAGraph()
        # Recording does nothing yet; the replay below is this step. Other threads, such as the one that watches over
        # collectives, may go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph
        graph.replay()

    def forget(self) -> None:
        """The tensors are others now: record anew."""
        self._graph, self._done = None, 0
