"""Record the memory in use after every operation, while a step runs on fake tensors."""

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

# A simulation of torch's caching allocator: how much memory it reserves on the device, given the allocations.
#
# It keeps freed blocks for later and splits large ones, so it reserves more than is in use. How much more depends only
# on the sizes and the order of allocations. The rules are those of torch's CUDA allocator with its default settings.


_MIB = 2**20
_UNIT = 512
_SMALL = _MIB
"""Blocks of up to this size come from small segments, which many blocks share."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""A block of at least this size gets a segment of its own."""


@dataclass(slots=True, eq=False)
class SegmentBlock:
    """A part of a segment, in use or free; a segment is memory that the allocator asked the device for at once."""

    segment: int
    start: int
    size: int
    pool: _Pool
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None
    used: bool = False


class _Pool:
    """The free blocks of small or of large segments, smallest first."""

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
    """Allocates and frees blocks; `reserved`: bytes of all segments, which the real allocator has from the device."""

    def __init__(self) -> None:
        self.reserved = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._segments = self._used = 0

    def allocate(self, size: int) -> SegmentBlock:
        """Return a block of at least `size` bytes."""
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
        """Reserve more, if necessary, so that `size` bytes are free in blocks of any sizes."""
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
"""`at_height` is called again only when memory exceeds the height before by this factor."""

END = "backward.end"
"""The name of the peak at the end of the backward pass; the others are named by their phases."""


class Watcher(Protocol):
    """Is called after every recorded operation."""

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Handle one operation, which was run in `phase` and returned `out`."""


@dataclass(slots=True)
class LiveMemory:
    """A storage that is in use."""

    size: int
    born: Phase
    sent: bool = False
    """Whether a collective read or wrote it."""
    alive: Any = None
    """A weak reference to the storage, with a callback for when it is freed."""
    block: Any = None
    """Its block in the simulated allocator."""


@dataclass(slots=True)
class Peak:
    """The most memory that was in use during a phase."""

    bytes: int = 0
    reserved: int = 0
    """The most bytes that the allocator had reserved until then."""


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all memory in use on one device. Enter it inside the fake world whose operations it records."""

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
        """How many operations the backward pass of the latest step had so far."""
        self.operations = 0
        self.pieces: dict[int, LiveMemory] = {}
        self.at_height: Callable[[int], None] | None = None
        """Is called with the bytes in use whenever they exceed `height`, which then becomes 2 % more than that."""
        self.height = 0
        self.at_peak: Callable[[str, int, bool], None] | None = None
        """Is called when a peak rises: with its name, the bytes beyond `pieces`, and if a kernel allocated those."""
        self.trail: list[tuple[Phase, int]] | None = None
        """(Phase, bytes in use) after every operation; None: they are not kept."""
        self.paused = False
        """Whether operations are run without being recorded, for example while another recorder records them."""
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
        """Until the block ends, see every operation, and every `resize_` of a storage, which is not an operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage)
            return out

        with replaced(torch.UntypedStorage, "resize_", resized), self:
            yield

    @contextmanager
    def ignoring_shape_propagation(self) -> Iterator[None]:
        """Until the block ends, do not record what DTensor computes to find shapes, once for each kind of operation."""

        def unseen(ask: Callable[..., Any]) -> Callable[..., Any]:
            def asked(*args: Any, **kwargs: Any) -> Any:
                with replaced(self, "paused", True):
                    return ask(*args, **kwargs)

            return asked

        with wrap_tensor_meta_propagation(unseen):
            yield

    def enter(self, phase: Phase) -> None:
        """Set the phase of the operations that follow."""
        if phase is not Phase.IDLE and self.phase is Phase.IDLE:
            self.backward_operations = 0
        self.phase = phase
        self._note_peak(phase)  # memory in use at its beginning counts for its peak

    def current_phase(self) -> Phase:
        """Return the phase. A pipeline alternates forward and backward within `FORWARD`; autograd shows which it is."""
        inside_backward = self.phase is Phase.FORWARD and in_backward_pass()
        return Phase.BACKWARD if inside_backward else self.phase

    def rise(self, size: int) -> None:
        """Record that `size` more bytes were in use for a moment, in separate allocations."""
        if self.at_height is not None and self.in_use + size > self.height:
            self.height = int((self.in_use + size) * _NOTABLE)
            self.at_height(self.in_use + size)
        if self._allocator is not None:
            self._allocator.stretch(size)
        phase = self.current_phase()
        self._raise(self.peaks[phase], phase, size, kernel=False)

    @contextmanager
    def nested(self, *watchers: Watcher, phase: Phase | None = None) -> Iterator[MemoryRecorder]:
        """Until the block ends, only a new recorder, with nothing in use, records the operations; yield it."""
        other = MemoryRecorder(self._device, watchers=watchers)
        other.phase = phase or Phase.IDLE
        self.paused = True
        try:
            with torch.no_grad(), other.recording():
                yield other
        finally:
            self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call; the usual path through all modes is slow
            return claimed_device(args[0])
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor then calls the operation on the local tensors
        kwargs = kwargs or {}
        body = None if self.paused else body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.paused or active_fake_mode() is not self._mode:
            return out  # in another fake mode, DTensor computes the shape of a result
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
        """Count the memory of a tensor that exists in `phase`; `sent`: a collective read or wrote it."""
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
        """Return the size of an allocation of `size` bytes: CUDA rounds up to 512."""
        return -(-size // 512) * 512 if self._device == "cuda" else size
