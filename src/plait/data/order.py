"""Sample order as a pure function of (seed, epoch, position).

[Note: a permutation without a table]
A shuffled list of indices costs memory for every sample and has to be rebuilt to resume. Here position
`p` of an epoch is mapped by a keyed bijection instead. `p` is written as a pair (left, right) of a grid
`rows × columns` just large enough for `length` cells, and a few Feistel rounds add to each half, in
turn, a keyed hash of the other: each round is invertible, so the whole is a bijection of the grid. The grid
has fewer than `rows` cells too many; a position that is mapped to one of them is mapped again by the same
bijection until it is inside (cycle walking), which keeps the result a bijection of `range(length)`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError

ROUNDS = 8


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 hash: a bijection of 64-bit integers, every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a 64-bit seed for one sample of one epoch, the same on every rank and worker."""
    return int.from_bytes(_digest(f"sample {seed} {epoch} {index}", 8), "little")


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Maps positions of an epoch to samples; each epoch has every sample once.

    The order is the same on every platform and for every number of ranks and workers.
    See [Note: a permutation without a table].
    """

    length: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(f"a dataset of {self.length} samples has no order: it needs at least one sample")

    def index(self, epoch: int, position: int) -> int:
        """Return the sample at one position of an epoch."""
        return int(self.indices(epoch, position, position + 1)[0])

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions `start` to `stop`, exclusive."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at any positions, at a cost independent of where they are."""
        if positions.size and (positions.min() < 0 or positions.max() >= self.length):
            raise IndexError(f"positions {positions.min()}..{positions.max()} of {self.length} samples")
        if not self.shuffle:
            return positions.astype(np.int64)
        keys = np.frombuffer(_digest(f"order {self.seed} {epoch}", 8 * ROUNDS), dtype="<u8").astype(np.uint64)
        samples = self._permute(positions.astype(np.uint64), keys)
        outside = np.flatnonzero(samples >= self.length)
        while outside.size:
            samples[outside] = self._permute(samples[outside], keys)
            outside = outside[samples[outside] >= self.length]
        return samples.astype(np.int64)

    def _permute(self, cells: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows = math.isqrt(self.length - 1) + 1
        columns = -(-self.length // rows)
        left, right = np.divmod(cells, np.uint64(columns))
        sizes = (np.uint64(rows), np.uint64(columns))
        for turn, key in enumerate(keys):
            # The hash is cut to 48 bits so that the sum cannot wrap, which would not be a bijection.
            left = (left + (splitmix64(right + key) >> np.uint64(16))) % sizes[turn % 2]
            left, right = right, left
        # After an even number of rounds, `left` and `right` are in their original roles.
        return left * sizes[1] + right
