"""How one global batch is cut over ranks and micro-batches. Pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

from plait.errors import DataError

Slice = tuple[int, int]
Table = tuple[tuple[Slice, ...], ...]
"""`table[rank][micro_index]` is the slice `[a, b)` of the global batch; `a == b` marks a filler."""


def cut(n: int, *, ranks: int, accumulation: int, micro: int) -> Table:
    """Cut a global batch of `n` samples, at most `ranks × accumulation × micro` of them.

    A full batch: micro-batch `m` over all ranks is one run of `ranks × micro` samples, and within it
    every rank has a run of `micro`. A short batch (the last of an epoch): the loads of two ranks differ
    by at most one sample, and every rank gets as many micro-batches as the fullest one needs, empty ones
    included, so that all ranks meet in the same collectives.
    """
    total = ranks * accumulation * micro
    if not 1 <= n <= total:
        raise DataError(
            f"a batch of {n} samples cannot be cut: {ranks} ranks × {accumulation} micro-batches × {micro} "
            f"samples take from 1 to {total}"
        )
    if n == total:
        return tuple(
            tuple(((m * ranks + r) * micro, (m * ranks + r + 1) * micro) for m in range(accumulation))
            for r in range(ranks)
        )
    parts = micro_batches(n, ranks=ranks, micro=micro)
    return tuple(tuple(spread(start, stop, parts)) for start, stop in spread(0, n, ranks))


def micro_batches(n: int, *, ranks: int, micro: int) -> int:
    """How many micro-batches the fullest rank needs when `n` samples are spread evenly."""
    return max(1, -(-n // (ranks * micro)))


def spread(start: int, stop: int, parts: int) -> list[Slice]:
    """Cut `[start, stop)` into runs whose lengths differ by at most one, longer ones first."""
    size, longer = divmod(stop - start, parts)
    bounds = [start + size * part + min(part, longer) for part in range(parts + 1)]
    return list(pairwise(bounds))
