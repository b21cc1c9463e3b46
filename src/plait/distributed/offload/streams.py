"""CUDA streams for copies between device and host that overlap with the computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.kernels import host_empty

_ALIGNMENT = 64
"""Tensors in one buffer begin at multiples of this: no two share a cache line."""


class CopyStreams:
    """A stream for copies to the host (D2H) and one for copies to the device (H2D); on a CPU, plain copies.

    Copies and computation are ordered by CUDA events, not by synchronizing the device. Where there are no streams (on
    a CPU, or with `fake`), copies are synchronous, and every event and stream is None.
    """

    def __init__(self, device: torch.device, *, fake: bool) -> None:
        """`fake`: the run is only simulated, to predict its memory and time, with fake tensors and no GPU."""
        self.device = device
        self.fake = fake
        self._streams = device.type == "cuda" and not fake
        self._d2h: Any = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]
        self._h2d: Any = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]

    @property
    def separate(self) -> bool:
        """Whether host and device have separate memory."""
        return self.device.type != "cpu"

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread; in a new thread it is GPU 0."""
        if self._streams:
            torch.cuda.set_device(self.device)

    def host_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized host tensor, pinned where the device is a GPU, so that copies are asynchronous."""
        return host_empty(*shape, dtype=dtype, pinned=self._streams)

    def copy_to_host(self, host: Tensor, tensor: Tensor) -> Any:
        """Copy a device tensor to `host`, after the work of the current stream; return the event after the copy."""
        if not self._streams or not tensor.is_cuda:
            host.copy_(tensor)
            return None
        self._d2h.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._d2h):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._d2h)
            return self._d2h.record_event()

    def copy_to_host_after(self, host: Tensor, tensor: Tensor, computed: Any) -> None:
        """Copy a tensor to `host` after the event `computed`, and block until it is copied: for a worker thread."""
        if not self._streams:
            host.copy_(tensor)
            return
        with torch.cuda.stream(self._d2h):
            self._d2h.wait_event(computed)
            host.copy_(tensor)

    def h2d(self) -> AbstractContextManager[Any]:
        """Return a context in which the H2D stream is the current one."""
        return torch.cuda.stream(self._h2d) if self._streams else nullcontext()

    def keep_for_h2d(self, tensor: Tensor) -> None:
        """Do not reuse the memory of a device tensor before H2D copies that write to it are done (`record_stream`)."""
        if self._streams:
            tensor.record_stream(self._h2d)

    def record(self) -> Any:
        """Return an event after the work issued to the current stream so far."""
        return torch.cuda.current_stream(self.device).record_event() if self._streams else None

    def record_h2d(self) -> Any:
        """Return an event after the copies to the device that were issued so far."""
        return self._h2d.record_event() if self._streams else None

    def h2d_wait(self, event: Any) -> None:
        """Have later copies to the device wait for an event."""
        if event is not None:
            self._h2d.wait_event(event)

    def new_stream(self) -> Any:
        """Return a new stream; None where there are none."""
        return torch.cuda.Stream(self.device) if self._streams else None  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which a stream from `new_stream` is the current one."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def record_on(self, stream: Any) -> Any:
        """Return an event after the work issued to a stream from `new_stream` so far."""
        return None if stream is None else stream.record_event()

    def wait_on(self, stream: Any, event: Any) -> None:
        """Have a stream from `new_stream` wait for an event."""
        if stream is not None and event is not None:
            stream.wait_event(event)

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        """Do not reuse the memory of a tensor before the work issued to a stream is done (`record_stream`)."""
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def copies_asynchronously(self, tensor: Tensor) -> bool:
        """Whether copies from and to a host tensor are asynchronous (it is pinned); true where there are no streams."""
        return not self._streams or tensor.is_pinned()

    def wait(self, event: Any) -> None:
        """Have the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class Scratch:
    """A host buffer that is reused for one bucket after another; it grows to the size of the largest."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.event: Any = None
        """Set by the user of the buffer: the event after the copy that reads it."""

    def wait(self) -> None:
        """Block until `event`, so that the buffer may be overwritten."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None

    def views(self, needed: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Return an uninitialized tensor of each shape and dtype, all in this buffer."""
        exact = [shape.numel() * dtype.itemsize for shape, dtype in needed]
        sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in exact]
        if self._memory.numel() < sum(sizes):
            self._memory = self._streams.host_tensor(torch.Size((sum(sizes),)), torch.uint8)
        pieces = self._memory[: sum(sizes)].split_with_sizes(sizes)
        return [
            piece[:size].view(dtype).view(shape)
            for piece, size, (shape, dtype) in zip(pieces, exact, needed, strict=True)
        ]
