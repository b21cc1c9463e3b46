"""Which rank sees which sample, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from itertools import islice

import torch
from torch.utils.data import Sampler

from plait.frontends.mmengine.dist import get_dist_info, sync_random_seed
from plait.frontends.mmengine.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler[int]):
    """One pass over the data set an epoch: every n-th sample of one order, which seed and epoch decide."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None, round_up: bool = True) -> None:
        self.rank, self.world_size = get_dist_info()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self.epoch = 0
        self._skipped = 0
        self.round_up = round_up
        count = len(dataset)
        self.num_samples = math.ceil((count if round_up else count - self.rank) / self.world_size)
        self.total_size = self.num_samples * self.world_size if round_up else count

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        else:
            order = list(range(count))
        if self.round_up and count:  # ranks must see equally many, so the first ones come again
            order = (order * math.ceil(self.total_size / count))[: self.total_size]
        begin, self._skipped = self._skipped, 0
        return iter(order[self.rank : self.total_size : self.world_size][begin:])

    def skip(self, samples: int) -> None:
        """Begin the next pass after so many samples of this rank."""
        self._skipped = samples

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Go on with the order of another epoch."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler[int]):
    """Passes without end, for loops that count iterations."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        self.rank, self.world_size = get_dist_info()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self._skipped = 0

    def _order(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        count = len(self.dataset)
        while True:
            yield from torch.randperm(count, generator=generator).tolist() if self.shuffle else range(count)

    def __iter__(self) -> Iterator[int]:
        begin, self._skipped = self._skipped, 0
        return islice(self._order(), self.rank + begin * self.world_size, None, self.world_size)

    def skip(self, samples: int) -> None:
        """Begin after so many samples of this rank."""
        self._skipped = samples

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """There are no epochs."""
