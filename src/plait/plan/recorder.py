"""Who holds how much memory, operation by operation, while a step runs on tensors without values."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.distributed import replaced
from plait.launch import Phase
from plait.plan.timing import body_of, hidden_bytes
from plait.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    claimed_device,
    in_backward_pass,
    storage_key,
    tree_leaves,
    wrap_tensor_meta_propagation,
)

# torch's caching allocator, without memory: what it asks the device for, given what it is asked for.
#
# It keeps freed blocks for later and cuts large ones up, so the device gives more than is in use. How much more depends
# on sizes and order alone, so it can be played. The rules are those of torch's CUDA allocator with its usual settings.


_MIB = 2**20
_UNIT = 512
_SMALL = _MIB
"""Up to this size a block comes from a segment that many share."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""From this size on, a new block gets a segment of its own."""


@dataclass(slots=True, eq=False)
class SegmentBlock:
    """A part of a segment."""

    segment: int
    start: int
    size: int
    pool: _Pool
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None
    used: bool = False


class _Pool:
    """The free blocks of one kind, smallest first."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, int, SegmentBlock]] = []

    def add(self, block: SegmentBlock) -> None:
        insort(self.free, (block.size, block.segment, block.start, block), key=lambda entry: entry[:3])

    def remove(self, block: SegmentBlock) -> None:
        del self.free[bisect_left(self.free, (block.size, block.segment, block.start), key=lambda entry: entry[:3])]

    def take(self, size: int) -> SegmentBlock | None:
        index = bisect_left(self.free, (size, -1, -1), key=lambda entry: entry[:3])
        return self.free.pop(index)[3] if index < len(self.free) else None


class CachingAllocator:
    """Gives out blocks; `reserved` is what the device would have given to it."""

    def __init__(self) -> None:
        self.reserved = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._segments = self._used = 0

    def allocate(self, size: int) -> SegmentBlock:
        """A block of at least `size` bytes."""
        size = max(_UNIT, -(-size // _UNIT) * _UNIT)
        pool = self._small if size <= _SMALL else self._large
        block = pool.take(size) or self._new_segment(pool, size)
        left = block.size - size
        if left >= _UNIT if pool.small else left > _SMALL:
            rest = SegmentBlock(block.segment, block.start + size, left, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            pool.add(rest)
        block.used = True
        self._used += block.size
        return block

    def free(self, block: SegmentBlock) -> None:
        """Take a block back, and join it with its free neighbours."""
        block.used = False
        self._used -= block.size
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and not before.used:
            pool.remove(before)
            block.start, block.size, block.before = before.start, block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.used:
            pool.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        pool.add(block)

    def stretch(self, size: int) -> None:
        """Have so many bytes free, in pieces of any size."""
        missing = size - (self.reserved - self._used)
        if missing > 0:
            self._large.add(self._new_segment(self._large, max(missing, _OWN_SEGMENT)))

    def _new_segment(self, pool: _Pool, size: int) -> SegmentBlock:
        if pool.small:
            size = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // (2 * _MIB)) * 2 * _MIB
        self._segments += 1
        self.reserved += size
        return SegmentBlock(self._segments, 0, size, pool)


_NOTABLE = 1.02
"""A peak that is not higher than the one before by this factor is not looked at again."""

END = "backward.end"
"""The name of the peak at the end of the backward pass; the others are named by their phases."""


class Watcher(Protocol):
    """What wants to know of every operation."""

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operation was run."""


@dataclass(slots=True)
class LiveMemory:
    """One piece of memory that is in use."""

    size: int
    born: Phase
    sent: bool = False
    """Whether a collective read or wrote it."""
    alive: Any = None
    """A weak reference to its storage, which tells when it is free again."""
    block: Any = None
    """Where the allocator put it."""


@dataclass(slots=True)
class Peak:
    """The most memory that was in use during a phase."""

    bytes: int = 0
    reserved: int = 0
    """What the allocator had asked the device for by then."""


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps account of all memory on one device. To be entered inside the fake world it watches."""

    def __init__(
        self, device: str, *, allocator: CachingAllocator | None = None, watchers: tuple[Watcher, ...] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.BUILD
        self.in_use = 0
        self.peaks: dict[Phase, Peak] = defaultdict(Peak)
        self.end = Peak()
        """The peak at the end of the backward pass: from `end_at` on."""
        self.end_at: int | None = None
        self.backward_operations = 0
        """So many there were in the backward pass of the latest step."""
        self.operations = 0
        self.pieces: dict[int, LiveMemory] = {}
        self.at_height: Callable[[int], None] | None = None
        """Is called with the bytes in use whenever they rise above `height`, which is raised by that and a little."""
        self.height = 0
        self.at_peak: Callable[[str, int, bool], None] | None = None
        """Is called when a peak rises: its name, the bytes beyond all pieces, and whether a kernel has those."""
        self.trail: list[tuple[Phase, int]] | None = None
        """Bytes in use after every operation, where somebody wants them."""
        self.paused = False
        """Whether operations are let through unseen, as while another recorder looks at them."""
        self._device = device
        self._allocator = allocator
        self._watchers = watchers
        self._mode: FakeTensorMode | None = None

    @contextmanager
    def recording(self) -> Iterator[MemoryRecorder]:
        """Record until the block ends."""
        self._mode = active_fake_mode()
        assert self._mode is not None, "a recorder is entered inside a fake world"
        with self.seeing():
            yield self

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """Every operation, and storages that change their size by no operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage)
            return out

        with replaced(torch.UntypedStorage, "resize_", resized), self:
            yield

    @contextmanager
    def ignoring_shape_propagation(self) -> Iterator[None]:
        """Until the block ends, do not see what DTensor computes, once for each kind of operation, to know a shape."""

        def unseen(ask: Callable[..., Any]) -> Callable[..., Any]:
            def asked(*args: Any, **kwargs: Any) -> Any:
                with replaced(self, "paused", True):
                    return ask(*args, **kwargs)

            return asked

        with wrap_tensor_meta_propagation(unseen):
            yield

    def enter(self, phase: Phase) -> None:
        """From now on the run is in this phase."""
        if phase is not Phase.IDLE and self.phase is Phase.IDLE:
            self.backward_operations = 0
        self.phase = phase
        self._note_peak(phase)  # what is held when it begins, is held during it

    def current_phase(self) -> Phase:
        """The phase that the run is in. A pipeline goes forward and back in turns without saying so."""
        inside_backward = self.phase is Phase.FORWARD and in_backward_pass()
        return Phase.BACKWARD if inside_backward else self.phase

    def rise(self, size: int) -> None:
        """Note that for a moment so much more was in use, in pieces of their own."""
        if self.at_height is not None and self.in_use + size > self.height:
            self.height = int((self.in_use + size) * _NOTABLE)
            self.at_height(self.in_use + size)
        if self._allocator is not None:
            self._allocator.stretch(size)
        phase = self.current_phase()
        self._raise(self.peaks[phase], phase, size, kernel=False)

    @contextmanager
    def nested(self, *watchers: Watcher, phase: Phase | None = None) -> Iterator[MemoryRecorder]:
        """Another one that begins at nothing, and alone sees what happens until the block ends."""
        other = MemoryRecorder(self._device, watchers=watchers)
        other.phase = phase or Phase.IDLE
        self.paused = True
        try:
            with torch.no_grad(), other.recording():
                yield other
        finally:
            self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most of all calls, and each would go through all modes
            return claimed_device(args[0])
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again, for the part that this rank holds
        kwargs = kwargs or {}
        body = None if self.paused else body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.paused or active_fake_mode() is not self._mode:
            return out  # or DTensor asks what shape a result would have
        phase = self.current_phase()
        self.operations += 1
        self.backward_operations += phase is Phase.BACKWARD
        sent = func.namespace in ("c10d", "_c10d_functional")
        if sent:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.hold(tensor, phase, sent=True)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.hold(tensor, phase, sent=sent)
        hidden = hidden_bytes(func, args) if self._device == "cuda" else 0
        self._note_peak(phase, hidden)
        for watcher in self._watchers:
            watcher.saw(phase, func, args, kwargs, out)
        if self.trail is not None:
            self.trail.append((phase, self.in_use + hidden))
        if self.at_height is not None and self.in_use + hidden > self.height:
            self.height = int((self.in_use + hidden) * _NOTABLE)
            self.at_height(self.in_use + hidden)
        return out

    def _note_peak(self, phase: Phase, hidden: int = 0) -> None:
        ending = phase is Phase.BACKWARD and self.end_at is not None and self.backward_operations > self.end_at
        peak = self.end if ending else self.peaks[phase]
        if self._allocator is not None:
            if hidden:
                self._allocator.free(self._allocator.allocate(hidden))
            peak.reserved = max(peak.reserved, self._allocator.reserved)
        self._raise(peak, END if ending else phase, hidden, kernel=True)

    def _raise(self, peak: Peak, name: str, beyond: int, *, kernel: bool) -> None:
        if self.in_use + beyond > peak.bytes:
            peak.bytes = self.in_use + beyond
            if self.at_peak is not None:
                self.at_peak(name, beyond, kernel)

    def hold(self, tensor: Tensor, phase: Phase, *, sent: bool) -> None:
        """Count the memory of a tensor that exists in this phase; `sent`: another rank sent it."""
        device = claimed_device(tensor)
        if device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        piece = self.pieces.get(key)
        if piece is not None:
            piece.sent |= sent
            if piece.size != self._rounded(storage.nbytes()):
                self._resized(storage)
            return
        piece = LiveMemory(self._rounded(storage.nbytes()), phase, sent)
        piece.alive = weakref.ref(storage, lambda _: self._free(key))
        self.pieces[key] = piece
        self._take(piece)

    def _take(self, piece: LiveMemory) -> None:
        self.in_use += piece.size
        if self._allocator is not None and piece.size:
            piece.block = self._allocator.allocate(piece.size)

    def _give(self, piece: LiveMemory) -> None:
        self.in_use -= piece.size
        if piece.block is not None:
            assert self._allocator is not None
            self._allocator.free(piece.block)
            piece.block = None

    def _free(self, key: int) -> None:
        piece = self.pieces.pop(key, None)
        if piece is not None:
            self._give(piece)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        piece = self.pieces.get(storage_key(storage))
        if piece is not None:
            self._give(piece)
            piece.size = self._rounded(storage.nbytes())
            self._take(piece)

    def _rounded(self, size: int) -> int:
        """What the device's allocator takes for so many bytes."""
        return -(-size // 512) * 512 if self._device == "cuda" else size
