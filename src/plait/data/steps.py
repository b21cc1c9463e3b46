"""The samples that each rank loads at each step of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.data.order import SampleOrder
from plait.errors import DataError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one forward pass.

    `inputs` is a mapping (passed as keywords), a tuple or list (passed as positions) or a single object.
    `samples` is how many samples count. Zero marks an empty micro-batch: a rank without samples left still
    takes part in every collective, but its loss and metrics are not counted.
    """

    inputs: Any
    samples: int


# How one global batch is split over ranks and micro-batches. Pure arithmetic.


Slice = tuple[int, int]
Table = tuple[tuple[Slice, ...], ...]
"""`table[rank][micro_index]` is the slice `[a, b)` of the global batch; `a == b` marks an empty micro-batch."""


def split_batch(n: int, *, ranks: int, accumulation: int, micro: int) -> Table:
    """Return the slices of a global batch of `n` samples, at most `ranks × accumulation × micro` of them.

    Full batch: micro-batch `m` of all ranks is one range of `ranks × micro` samples, and within it every
    rank has a range of `micro`. Short batch (the last of an epoch): the numbers of samples of two ranks
    differ by at most one, and every rank gets as many micro-batches as the fullest one needs, empty ones
    included, so that all ranks take part in the same collectives.
    """
    total = ranks * accumulation * micro
    if not 1 <= n <= total:
        raise DataError(
            f"a batch of {n} samples cannot be split: {ranks} ranks × {accumulation} micro-batches × {micro} "
            f"samples take from 1 to {total}"
        )
    if n == total:
        return tuple(
            tuple(((m * ranks + r) * micro, (m * ranks + r + 1) * micro) for m in range(accumulation))
            for r in range(ranks)
        )
    count = micro_batches(n, ranks=ranks, micro=micro)
    return tuple(tuple(split_evenly(start, stop, count)) for start, stop in split_evenly(0, n, ranks))


def micro_batches(n: int, *, ranks: int, micro: int) -> int:
    """Return how many micro-batches the rank with the most samples needs when `n` samples are split evenly."""
    return max(1, -(-n // (ranks * micro)))


def split_evenly(start: int, stop: int, count: int) -> list[Slice]:
    """Return `[start, stop)` as `count` ranges whose lengths differ by at most one, longer ones first."""
    size, longer = divmod(stop - start, count)
    bounds = [start + size * index + min(index, longer) for index in range(count + 1)]
    return list(pairwise(bounds))


CHUNK = 4096
"""The number of samples whose order is computed at once: enough that numpy's overhead per call is negligible, few
enough that the first batch is not delayed."""

Ids = tuple[list[int], int]
"""The samples of one micro-batch and how many of them count: all, or none for an empty micro-batch."""


class BatchSizes(Protocol):
    """The three sizes of a batch."""

    @property
    def total(self) -> int:
        """Samples in one optimizer step, over all ranks."""

    @property
    def micro(self) -> int:
        """Samples in one forward/backward on one rank."""

    @property
    def accumulation(self) -> int:
        """Forward/backward passes in one optimizer step."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of every global batch that one rank loads."""

    rank: int
    ranks: int
    total: int
    micro: int
    accumulation: int

    @classmethod
    def of(cls, batch: BatchSizes, *, rank: int, ranks: int) -> RankShare:
        """Return the share of `rank`; the sizes must agree with the number of ranks."""
        if not 0 <= rank < ranks:
            raise DataError(f"rank {rank} of {ranks}: ranks are counted from 0 to {ranks - 1}")
        if batch.total != batch.micro * batch.accumulation * ranks:
            raise DataError(
                f"batch.total {batch.total} is not micro {batch.micro} × accumulation {batch.accumulation} "
                f"× {ranks} ranks = {batch.micro * batch.accumulation * ranks}"
            )
        return cls(rank, ranks, batch.total, batch.micro, batch.accumulation)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of each step on one rank, computed on demand: resuming at a late step costs no more."""

    order: SampleOrder
    share: RankShare
    drop_last: bool

    def __len__(self) -> int:
        full, rest = divmod(self.order.length, self.share.total)
        return full + bool(rest and not self.drop_last)

    def ids(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the samples of a step over all ranks, in the order of the global batch."""
        start = step * self.share.total
        return self.order.indices(epoch, start, min(start + self.share.total, self.order.length))

    def steps_from(self, epoch: int, start: int) -> Iterator[list[Ids]]:
        """Yield this rank's micro-batches of each step, from `start` to the end of the epoch."""
        share = self.share
        full = self.order.length // share.total
        slices = _slices(share, share.total)
        offsets = np.array([np.arange(a, b) for a, b in slices])
        chunk = max(1, CHUNK // offsets.size)
        for first in range(start, full, chunk):
            steps = np.arange(first, min(first + chunk, full))
            positions = steps[:, None, None] * share.total + offsets
            table = self.order.at(epoch, positions.ravel()).reshape(positions.shape).tolist()
            for step in table:
                yield [(ids, share.micro) for ids in step]
        if start <= full < len(self):
            yield self._short(epoch, full)

    def _short(self, epoch: int, step: int) -> list[Ids]:
        ids = self.ids(epoch, step).tolist()
        # An empty micro-batch has a sample that does not count: this rank runs the same code and collectives.
        return [(ids[a:b], b - a) if b > a else (ids[:1], 0) for a, b in _slices(self.share, len(ids))]


def _slices(share: RankShare, n: int) -> tuple[tuple[int, int], ...]:
    return split_batch(n, ranks=share.ranks, accumulation=share.accumulation, micro=share.micro)[share.rank]
