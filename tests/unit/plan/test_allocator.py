"""The caching allocator without memory keeps the rules of one with memory, whatever it is asked."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.plan.recorder import CachingAllocator, SegmentBlock

MIB = 2**20
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, MIB), st.integers(MIB, 64 * MIB))
STEPS = st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 1000)), max_size=120)
"""What is asked for, whether something is freed after it, and what."""


def blocks_of(held: list[SegmentBlock]) -> dict[int, list[tuple[int, int]]]:
    found = defaultdict(list)
    for block in held:
        found[block.segment].append((block.start, block.start + block.size))
    return found


@settings(max_examples=60)
@given(STEPS)
def test_blocks_are_large_enough_and_never_overlap_and_what_is_reserved_never_shrinks(
    steps: list[tuple[int, bool, int]],
) -> None:
    allocator, held, reserved = CachingAllocator(), [], 0
    for size, frees, which in steps:
        block = allocator.allocate(size)
        assert block.size >= size
        held.append(block)
        if frees:
            allocator.free(held.pop(which % len(held)))
        for places in blocks_of(held).values():
            ordered = sorted(places)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
        assert allocator.reserved >= reserved
        assert allocator.reserved >= sum(each.size for each in held)
        reserved = allocator.reserved


@settings(max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_what_is_freed_in_any_order_joins_to_whole_segments_again(sizes: list[int], random: object) -> None:
    allocator = CachingAllocator()
    held = [allocator.allocate(size) for size in sizes]
    random.shuffle(held)  # type: ignore[attr-defined]
    for block in held:
        allocator.free(block)
    free = [entry[3] for pool in (allocator._small, allocator._large) for entry in pool.free]
    assert sum(block.size for block in free) == allocator.reserved
    assert all(block.start == 0 and block.before is None and block.after is None for block in free)
    assert len({block.segment for block in free}) == len(free)


@settings(max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=40))
def test_steps_that_are_alike_reserve_nothing_new_after_the_first_few(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    seen = []
    for _ in range(12):  # the second may cut the first one's segments up in another way
        held = [allocator.allocate(size) for size in sizes]
        for block in held:
            allocator.free(block)
        seen.append(allocator.reserved)
    assert seen[-1] == seen[-2]


def test_small_blocks_share_a_segment_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(1000), allocator.allocate(MIB - 4096)
    assert first.segment == second.segment
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(3 * MIB).size == 3 * MIB
    assert allocator.reserved == 22 * MIB
    allocator.allocate(17 * MIB)  # the rest of the segment of 20 MiB would do
    assert allocator.reserved == 22 * MIB
    allocator.allocate(31 * MIB)
    assert allocator.reserved == 54 * MIB


@given(st.integers(1, 100 * MIB))
def test_stretching_makes_room_once(size: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(5 * MIB)
    allocator.stretch(size)
    reserved = allocator.reserved
    assert reserved - 5 * MIB >= size
    allocator.stretch(size)
    assert allocator.reserved == reserved
