"""Which samples are whose, in Accelerate's order.

[Note: whose batch is whose]
The user's loader is written for one process. Without `split_batches` its batches go round: rank r takes batch
r, r + n, r + 2n, … With it, each batch is cut into n pieces. With `even_batches` the last round is filled up with
samples from the beginning, so that every rank has equally many batches of equal size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from plait.torch_internals import samples_asked_for


@dataclass(frozen=True, slots=True)
class Share:
    """Which batches a rank takes, and how they reach it."""

    rank: int
    ranks: int
    split: bool = False
    even: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks


class ShareSampler(BatchSampler):
    """The batches of indices that one rank takes."""

    def __init__(self, sampler: Any, share: Share) -> None:
        # No sampler of torch's own lies below: `batch_size` and `drop_last` are read from what was given.
        self.batch_sampler = sampler
        self.share = share
        self.batch_size: Any = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)
        self.even_batches = share.even

    @property
    def sampler(self) -> Any:
        """What the user's loader draws samples with."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        length, ranks = len(self.batch_sampler), self.share.ranks
        if self.share.split or length % ranks == 0:
            return length if self.share.split else length // ranks
        if self.drop_last:
            return length // ranks
        return length // ranks + (1 if self.even_batches or self.share.rank < length % ranks else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pieces() if self.share.split else self._rounds()

    def _pieces(self) -> Iterator[list[Any]]:
        share, whole = self.share, self.batch_size
        size = whole // share.ranks
        mine = slice(size * share.rank, size * (share.rank + 1))
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == whole:
                yield batch[mine]
            elif self.drop_last:
                return
            elif not self.even_batches:
                if len(batch) > mine.start:
                    yield batch[mine]
            else:
                yield _filled(batch, first, whole)[mine]

    def _rounds(self) -> Iterator[list[Any]]:
        """Round by round; the last one, where it is not full, is filled up, handed out as it is, or dropped."""
        share, size = self.share, self.batch_size
        batches = iter(self.batch_sampler)
        first: list[list[Any]] = []
        while batch_round := list(islice(batches, share.ranks)):
            first = first or [list(batch) for batch in batch_round]
            full = len(batch_round) == share.ranks and (size is None or len(batch_round[-1]) == size)
            if not full:
                if self.drop_last:
                    return
                if self.even_batches:
                    batch_round = self._filled_round(batch_round, first)
            if share.rank < len(batch_round):
                yield batch_round[share.rank]

    def _filled_round(self, batch_round: list[list[Any]], first: list[list[Any]]) -> list[list[Any]]:
        ranks, size = self.share.ranks, self.batch_size
        if size is None:  # batches of any length are repeated whole
            while len(first) < ranks:
                first = first + first
            return batch_round + first[: ranks - len(batch_round)]
        indices = _filled(list(chain(*batch_round)), list(chain(*first)), ranks * size)
        return [indices[start : start + size] for start in range(0, ranks * size, size)]


def _filled(batch: list[Any], first: list[Any], size: int) -> list[Any]:
    while len(batch) < size:
        batch = batch + first
    return batch[:size]


class ShareDataset(IterableDataset[Any]):
    """The samples of a stream that one rank takes; every rank reads all of them."""

    def __init__(self, dataset: Any, share: Share, batch_size: int, *, drop_last: bool) -> None:
        self.dataset = dataset
        self._share = share
        self._round = batch_size if share.split else batch_size * share.ranks
        self._drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """For data sets that shuffle by epoch."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self._round)
        return (rounds + (1 if rest and not self._drop_last else 0)) * self._round // self._share.ranks

    def __iter__(self) -> Iterator[Any]:
        size = self._round // self._share.ranks
        samples = iter(self.dataset)
        first: list[Any] = []
        while group := list(islice(samples, self._round)):
            first = first or group
            if len(group) < self._round:
                if self._drop_last:
                    return
                group = _filled(group, first, self._round)
            yield from group[size * self._share.rank : size * (self._share.rank + 1)]


class SeedableSampler(RandomSampler):
    """Shuffles by seed and epoch alone, so that any epoch can be had again."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        count = samples_asked_for(sampler)
        super().__init__(sampler.data_source, replacement=sampler.replacement, num_samples=count)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class RecordedSampler(RandomSampler):
    """Shuffles as torch's own does with one process, and remembers how, so that a pass can be had again."""

    def __init__(self, sampler: RandomSampler) -> None:
        count = samples_asked_for(sampler)
        super().__init__(sampler.data_source, replacement=sampler.replacement, num_samples=count)
        self.order: torch.Tensor | None = None
        """State of the generator at the beginning of the pass."""
        self.again: torch.Tensor | None = None
        """The state that the next pass begins with, where it is one to be had again."""

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        if self.again is None:
            self.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        else:
            self.generator.set_state(self.again)
            self.again = None
        self.order = self.generator.get_state()
        yield from super().__iter__()


class SkippingSampler(BatchSampler):
    """Batches of indices without the first ones."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.batch_sampler = sampler
        self.batch_size: Any = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)
        self._count = count

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self._count, 0)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self._count, None)
