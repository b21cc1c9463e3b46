"""Copies between a device and the host that go on beside the computing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.kernels import host_empty

_APART = 64
"""Tensors in one piece of memory begin at multiples of this: no two share a line of a cache."""


class CopyStreams:
    """One stream out of the device and one back; on a CPU, plain copies.

    Everything is ordered by events, so a copy begins when what it reads is there, and whoever waits for a mark waits
    for the copies before it and for nothing else.
    """

    def __init__(self, device: torch.device, *, fake: bool) -> None:
        """`fake`: a plan, whose tensors have no values and whose device has no streams."""
        self.device = device
        self.fake = fake
        self._streams = device.type == "cuda" and not fake
        self._out: Any = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]
        self._back: Any = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]

    @property
    def separate(self) -> bool:
        """Whether host and device have memory of their own."""
        return self.device.type != "cpu"

    def enter_thread(self) -> None:
        """Make the device the current one of another thread, which would begin with the first of the host."""
        if self._streams:
            torch.cuda.set_device(self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to without anybody waiting."""
        return host_empty(*shape, dtype=dtype, pinned=self._streams)

    def out(self, room: Tensor, tensor: Tensor) -> Any:
        """Copy a tensor of the device to the host, once it is computed; returns a mark."""
        if not self._streams or not tensor.is_cuda:
            room.copy_(tensor)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            room.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._out)
            return self._out.record_event()

    def fetch(self, room: Tensor, tensor: Tensor, computed: Any) -> None:
        """Copy a tensor that is computed by a mark to the host, and wait for it: for another thread than the loop's."""
        if not self._streams:
            room.copy_(tensor)
            return
        with torch.cuda.stream(self._out):
            self._out.wait_event(computed)
            room.copy_(tensor)

    def backwards(self) -> AbstractContextManager[Any]:
        """The context for copies back: the stream on which they run."""
        return torch.cuda.stream(self._back) if self._streams else nullcontext()

    def fills(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that copies back write to until they are done, even if it is given back."""
        if self._streams:
            tensor.record_stream(self._back)

    def mark(self) -> Any:
        """What the current stream has done by now."""
        return torch.cuda.current_stream(self.device).record_event() if self._streams else None

    def mark_back(self) -> Any:
        """The copies back that were asked for until now."""
        return self._back.record_event() if self._streams else None

    def hold_back(self, mark: Any) -> None:
        """Let no copy back begin before a mark of the computing."""
        if mark is not None:
            self._back.wait_event(mark)

    def stream(self) -> Any:
        """One more, for whoever has an order of its own; None where there are none."""
        return torch.cuda.Stream(self.device) if self._streams else None  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The context for work on such a stream."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def mark_of(self, stream: Any) -> Any:
        """What it was asked for until now."""
        return None if stream is None else stream.record_event()

    def order(self, stream: Any, mark: Any) -> None:
        """Let it begin nothing more before a mark."""
        if stream is not None and mark is not None:
            stream.wait_event(mark)

    def used_by(self, stream: Any, tensor: Tensor) -> None:
        """Keep the memory of a tensor until what such a stream was asked for is done."""
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def is_room(self, tensor: Tensor) -> bool:
        """Whether copies from and to a tensor of the host need not be waited for."""
        return not self._streams or tensor.is_pinned()

    def follow(self, mark: Any) -> None:
        """Let the current stream wait for a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


class Scratch:
    """Host memory that one bucket after another uses; it grows to the largest and is kept."""

    def __init__(self, lanes: CopyStreams) -> None:
        self._lanes = lanes
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.mark: Any = None

    def wait(self) -> None:
        """Until the device has read what was here."""
        if self.mark is not None:
            self.mark.synchronize()
            self.mark = None

    def views(self, needed: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """A tensor of each shape and dtype, unfilled."""
        exact = [shape.numel() * dtype.itemsize for shape, dtype in needed]
        sizes = [-(-size // _APART) * _APART for size in exact]
        if self._memory.numel() < sum(sizes):
            self._memory = self._lanes.room(torch.Size((sum(sizes),)), torch.uint8)
        pieces = self._memory[: sum(sizes)].split_with_sizes(sizes)
        return [
            piece[:size].view(dtype).view(shape)
            for piece, size, (shape, dtype) in zip(pieces, exact, needed, strict=True)
        ]
