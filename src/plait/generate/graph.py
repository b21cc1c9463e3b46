"""One step recorded as a CUDA graph and repeated.

A small model writes a token in less time than Python needs to ask for its kernels. Recorded, they are asked for at
once. What is recorded must read and write the same tensors each time; `Answers.take` and `CachedDecoder.step` do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

WARM_UP = 1
"""Steps done before recording: libraries set themselves up in the first one. They count like any other."""

ENOUGH = 8 << 30
"""Bytes of free memory with which a recording needs none of what is kept unused."""


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
        # Recording does nothing yet; the replay is this step.
        self._graph = record(self._step)
        self._graph.replay()

    def forget(self) -> None:
        """The tensors are others now: record anew."""
        self._graph, self._done = None, 0


def record(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a graph.

    `torch.cuda.graph` gives all unused memory back first, and what reads the next prompts would have to ask for it
    again: that is done only where memory is short.
    """
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < ENOUGH:
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        # Other threads, such as the one that watches over collectives, may go on meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    return graph


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: libraries keep some memory for every stream that they meet."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
