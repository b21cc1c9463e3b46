"""CUDA graphs: kernels are captured once and replayed with a single launch.

A captured function must read and write the same tensors at each replay, and must not synchronize with the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

ENOUGH = 8 << 30
"""Bytes of free device memory from which on a capture does not need the allocator's cached memory."""


def capture_graph(work: Callable[[], None], share_with: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """Return a graph of the kernels that `work` launches. They are not run yet; kernels in flight are not waited for.

    `torch.cuda.graph` first synchronizes and empties the allocator's cache, which then has to be filled again; here
    that is done only where memory is short. With `share_with`, the graph uses the memory pool of that graph; graphs
    that share a pool must not run at the same time.
    """
    if torch.cuda.mem_get_info()[0] < ENOUGH:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # "thread_local": other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        graph.capture_begin(None if share_with is None else share_with.pool(), capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the one stream for all captures on a device: cuBLAS and others allocate a workspace per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
