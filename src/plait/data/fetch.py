"""From sample ids to the inputs of one micro-batch, the same in this process and in a worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from plait.data.collate import Collate
from plait.data.order import sample_seed


class Fetch:
    """Reads samples and collates them."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate
        self.many = getattr(dataset, "__getitems__", None)

    def __call__(self, ids: list[int]) -> Any:
        """The inputs made of these samples."""
        if self.many is not None:
            return self.collate(self.many(ids))
        dataset = self.dataset
        return self.collate([dataset[index] for index in ids])


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call the data set's `set_epoch`, if it has one."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


class WorkerFetch(Dataset[Any]):
    """What a worker process runs: its keys are `(epoch, ids)`, its items whole micro-batches.

    The epoch travels with the ids because a worker outlives an epoch and has no other way to hear of it.
    Before each sample the worker's generators (torch, numpy, random) are seeded from (seed, epoch, index):
    a data set that draws from them gives the same samples for any number of ranks and workers, and after a
    resume. Where the data set reads many samples at once (`__getitems__`), the first of them is the seed.
    """

    def __init__(self, fetch: Fetch, seed: int) -> None:
        self._fetch = fetch
        self._seed = seed
        self._epoch: int | None = None

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, ids = key
        if epoch != self._epoch:
            tell_epoch(self._fetch.dataset, epoch)
            self._epoch = epoch
        if self._fetch.many is not None:
            self._reseed(epoch, ids[0])
            return self._fetch(ids)
        return self._fetch.collate([self._sample(epoch, index) for index in ids])

    def _sample(self, epoch: int, index: int) -> Any:
        self._reseed(epoch, index)
        return self._fetch.dataset[index]

    def _reseed(self, epoch: int, index: int) -> None:
        seed = sample_seed(self._seed, epoch, index)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
