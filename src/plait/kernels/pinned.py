"""Host memory for tensors that meet disks and devices: aligned to pages, pinned where asked."""

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
"""What direct I/O asks of addresses, lengths and places in a file: enough for every disk in use."""


_PART = 8 << 20
"""Bytes whose pages a thread clears at a time."""


_PROBE = 32 << 20
"""Bytes that show how fast a link is."""


def rounded(size: int) -> int:
    """The bytes that `size` bytes take up in whole blocks of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def host_empty(*shape: int, dtype: torch.dtype = torch.float32, pinned: bool = False) -> Tensor:
    """An unfilled CPU tensor that begins at a block and has all bytes of its last one to itself.

    `pinned`: a CUDA device copies from and to it without waiting. torch's own pinned memory comes in powers of two, up
    to twice what was asked for; this pins exactly what it needs.
    """
    size = prod(shape) * dtype.itemsize
    if pinned and size:
        return _pinned(size).view(dtype).view(shape)
    room = torch.empty(rounded(size) + ALIGNMENT, dtype=torch.uint8)
    skip = _to_next_block(room)
    return room[skip : skip + size].view(dtype).view(shape)


@on_fake_tensors(lambda room: 0)
def _to_next_block(room: Tensor) -> int:
    return -room.data_ptr() % ALIGNMENT


def _pinned(size: int) -> Tensor:
    # Pages of our own rather than of torch's storage: that has no Python object which lives as long as it does, and
    # would be unpinned while it is in use.
    pages = _Pages(-1, rounded(size))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    _touch(room)
    pages.pin(room.data_ptr(), rounded(size))
    return room[:size]


def _touch(room: Tensor) -> None:
    """Have every page cleared, by many threads: while it pins, CUDA would have that done to one after the other.

    The system clears about a GB/s in a thread. torch's own threads would not share so few operations.
    """
    parts = torch.split(room, _PART)
    if len(parts) == 1:
        room[::ALIGNMENT].zero_()
        return
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:
        for _ in threads.map(lambda part: part[::ALIGNMENT].zero_(), parts):
            pass


class _Pages(mmap.mmap):
    """Pages that CUDA is told of, and told when they go.

    [Note: pages that go] That must be before they are given back: pages that come later may lie at the same address,
    and CUDA would copy from and to the old ones. A weak reference to a map is told only afterwards.
    """

    unpin: Callable[[], object] | None = None

    def pin(self, address: int, size: int) -> None:
        _pin(address, size)
        unregister, owner = torch.cuda.cudart().cudaHostUnregister, os.getpid()  # type: ignore[no-untyped-call]
        self.unpin = lambda: unregister(address) if os.getpid() == owner else None  # a fork has no CUDA

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
    """GB/s that copies from pinned memory to a CUDA device reach, measured in a few hundredths of a second."""
    there = torch.empty(_PROBE, dtype=torch.uint8, device=device)
    return copy_gbps(there, host_empty(_PROBE, dtype=torch.uint8, pinned=True), device, times=4)


def copy_gbps(target: Tensor, source: Tensor, device: torch.device, *, times: int) -> float:
    """GB/s of the fastest of some copies between a CUDA device and pinned memory, by the device's own clock."""
    best, stream = float("inf"), torch.cuda.current_stream(device)
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return source.nbytes / best / 1e6
