"""Samplers, and how samples become a batch."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torch.utils.data import default_collate as stack

from plait.errors import DataError
from plait.frontends.mmengine.dist import get_dist_info, sync_random_seed
from plait.frontends.mmengine.registry import DATA_SAMPLERS, FUNCTIONS

# How a list of samples becomes a batch.


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Turn a list of samples inside out; what the samples are made of stays in lists, unstacked."""
    return _transpose(data_batch, lambda leaves: leaves)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Turn a list of samples inside out, and stack tensors, arrays and numbers."""
    return _transpose(data_batch, _stacked)


def _stacked(leaves: Sequence[Any]) -> Any:
    # MMEngine's data elements carry what belongs to one sample; they stay in a list.
    elements = any(base.__name__ == "BaseDataElement" for base in type(leaves[0]).__mro__)
    return leaves if elements or leaves[0] is None else stack(list(leaves))


def _transpose(batch: Sequence[Any], finish: Callable[[Sequence[Any]], Any]) -> Any:
    first = batch[0]
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {key: _transpose([sample[key] for sample in batch], finish) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_transpose(column, finish) for column in zip(*batch, strict=True)))
    if isinstance(first, Sequence):
        sizes = sorted({len(sample) for sample in batch})
        if len(sizes) > 1:
            raise DataError(f"the samples of one batch have {sizes[0]} to {sizes[-1]} parts; give all equally many")
        return [_transpose(column, finish) for column in zip(*batch, strict=True)]
    return finish(batch)


# Which rank sees which sample, and when.


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


# Random numbers of the processes that load data.


@FUNCTIONS.register_module()
def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, disable_subprocess_warning: bool = False
) -> None:
    """Give each worker of each rank a seed of its own."""
    worker_seed = (num_workers * rank + worker_id + seed) % 2**32
    random.seed(worker_seed)
    np.random.seed(worker_seed)
    torch.manual_seed(worker_seed)
    if disable_subprocess_warning and worker_id != 0:
        warnings.simplefilter("ignore")
