"""Host memory for transfers to disks and devices: page-aligned, optionally pinned; and the speed of such transfers."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from plait.errors import TrainingError
from plait.fake_tensors import on_fake_tensors

ALIGNMENT = 4096
"""Addresses, lengths and file offsets of direct I/O are multiples of this; all common disks accept it."""
_CLEAR_BYTES = 8 << 20
"""Bytes of new memory that one thread faults in at a time."""
_PROBE = 32 << 20
"""Bytes that are copied to measure a link."""


def rounded(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def host_empty(*shape: int, dtype: torch.dtype = torch.float32, pinned: bool = False) -> Tensor:
    """Return an uninitialized CPU tensor that starts at a page boundary and shares no page with other tensors.

    `pinned`: a CUDA device copies from and to it asynchronously. torch's own pinned allocator rounds up to powers of
    two, up to twice the size; this pins whole pages only.
    """
    size = prod(shape) * dtype.itemsize
    if pinned and size:
        return _pinned(size).view(dtype).view(shape)
    buffer = torch.empty(rounded(size) + ALIGNMENT, dtype=torch.uint8)
    skip = _to_next_block(buffer)
    return buffer[skip : skip + size].view(dtype).view(shape)


@on_fake_tensors(lambda buffer: 0)
def _to_next_block(buffer: Tensor) -> int:
    return -buffer.data_ptr() % ALIGNMENT


def _pinned(size: int) -> Tensor:
    # The memory is an `mmap`, whose Python object lives exactly as long as tensors use it, and which unpins it at its
    # end. torch's own storage has no such object: its memory could be unpinned while it is in use.
    pages = _Pages(-1, rounded(size))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    _touch(buffer)
    pages.pin(buffer.data_ptr(), rounded(size))
    return buffer[:size]


def _touch(buffer: Tensor) -> None:
    """Write to every page, in many threads, so that Linux allocates and zeroes them in parallel, at about 1 GB/s each.

    Otherwise `cudaHostRegister` would have them zeroed one after another. The threads are Python's: torch would not
    parallelize an operation on so few elements.
    """
    chunks = torch.split(buffer, _CLEAR_BYTES)
    if len(chunks) == 1:
        buffer[::ALIGNMENT].zero_()
        return
    with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as threads:
        for _ in threads.map(lambda chunk: chunk[::ALIGNMENT].zero_(), chunks):
            pass


class _Pages(mmap.mmap):
    """Anonymous memory that is registered with CUDA, and unregistered before it is unmapped.

    [Note: unregistered before unmapped] If memory were unmapped while it is registered, later memory could get the same
    address, and CUDA would copy from and to the old pages. So `__del__` unregisters it. The callback of a weak
    reference to the map would run too late, after the memory is unmapped.
    """

    unpin: Callable[[], object] | None = None

    def pin(self, address: int, size: int) -> None:
        _pin(address, size)
        unregister, owner = torch.cuda.cudart().cudaHostUnregister, os.getpid()  # type: ignore[no-untyped-call]
        self.unpin = lambda: unregister(address) if os.getpid() == owner else None  # a forked child has no CUDA context

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def _pin(address: int, size: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code != 0:
        raise TrainingError(
            f"CUDA cannot pin {size / 2**30:.2f} GiB of host memory (error {code}). Pinned memory cannot be swapped "
            "out and may be limited: see `ulimit -l` and the memory limit of the container, or offload less."
        )


def link_gbps(device: torch.device) -> float:
    """Measure and return the GB/s of copies from pinned memory to a CUDA device; takes a few hundredths of a second."""
    there = torch.empty(_PROBE, dtype=torch.uint8, device=device)
    return copy_gbps(there, host_empty(_PROBE, dtype=torch.uint8, pinned=True), device, times=4)


def copy_gbps(target: Tensor, source: Tensor, device: torch.device, *, times: int) -> float:
    """Return the GB/s of the fastest of `times` copies between a CUDA device and pinned memory, by CUDA events."""
    best, stream = float("inf"), torch.cuda.current_stream(device)
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return source.nbytes / best / 1e6
