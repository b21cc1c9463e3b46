"""Work of the device recorded as a CUDA graph: asked for once, repeated at once, without Python in between.

What is recorded must read and write the same tensors each time, and must not ask the device for anything that the host
would have to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

ENOUGH = 8 << 30
"""Bytes of free memory with which a recording needs none of what is kept unused."""


def record(work: Callable[[], None], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """Some work as a graph; none of it is done yet, and the device goes on with what it was asked for before.

    `torch.cuda.graph` waits for that and gives all unused memory back first, and whoever comes next would have to ask
    for it again: that is done only where memory is short. A recording shares the memory of the one `beside` it; no two
    that do may be under way at once.
    """
    if torch.cuda.mem_get_info()[0] < ENOUGH:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), recording_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Other threads, such as the one that watches over collectives, may go on meanwhile.
        graph.capture_begin(None if beside is None else beside.pool(), capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: libraries keep some memory for every stream that they meet."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
