"""torch's caching allocator, without memory: what it asks the device for, given what it is asked for.

It keeps freed blocks for later and cuts large ones up, so the device gives more than is in use. How much more depends
on sizes and order alone, so it can be played. The rules are those of torch's CUDA allocator with its usual settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
_UNIT = 512
_SMALL = _MIB
"""Up to this size a block comes from a segment that many share."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""From this size on, a new block gets a segment of its own."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    segment: int
    start: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    used: bool = False


class _Pool:
    """The free blocks of one kind, smallest first."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.start, block), key=lambda entry: entry[:3])

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.segment, block.start), key=lambda entry: entry[:3])]

    def take(self, size: int) -> Block | None:
        place = bisect_left(self.free, (size, -1, -1), key=lambda entry: entry[:3])
        return self.free.pop(place)[3] if place < len(self.free) else None


class CachingAllocator:
    """Gives out blocks; `reserved` is what the device would have given to it."""

    def __init__(self) -> None:
        self.reserved = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._segments = self._used = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes."""
        size = max(_UNIT, -(-size // _UNIT) * _UNIT)
        pool = self._small if size <= _SMALL else self._large
        block = pool.take(size) or self._new_segment(pool, size)
        left = block.size - size
        if left >= _UNIT if pool.small else left > _SMALL:
            rest = Block(block.segment, block.start + size, left, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            pool.add(rest)
        block.used = True
        self._used += block.size
        return block

    def free(self, block: Block) -> None:
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

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        if pool.small:
            size = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // (2 * _MIB)) * 2 * _MIB
        self._segments += 1
        self.reserved += size
        return Block(self._segments, 0, size, pool)
