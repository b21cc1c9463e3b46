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


def record(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a graph; the device goes on meanwhile with what it was asked for before.

    `torch.cuda.graph` waits for that and gives all unused memory back first, and what reads the next prompts would have
    to ask for it again: that is done only where memory is short.
    """
    if torch.cuda.mem_get_info()[0] < ENOUGH:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
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
