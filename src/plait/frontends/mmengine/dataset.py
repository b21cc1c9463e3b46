"""Collate functions, samplers and data loaders."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from plait.data import stack
from plait.errors import ConfigError, DataError, Problem
from plait.frontends.mmengine.dist import get_dist_info, get_rank, get_world_size, sync_random_seed
from plait.frontends.mmengine.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, check_arguments

# Collate functions.


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Return a list of samples as one sample whose values are lists, without stacking."""
    return _transpose(data_batch, lambda leaves: leaves)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Return a list of samples as one sample whose tensors, arrays and numbers are stacked."""
    return _transpose(data_batch, _stacked)


def _stacked(leaves: Sequence[Any]) -> Any:
    # MMEngine's data elements hold the data of one sample; they stay in a list.
    elements = any(base.__name__ == "BaseDataElement" for base in type(leaves[0]).__mro__)
    return leaves if elements or leaves[0] is None else stack(list(leaves))


def _transpose(batch: Sequence[Any], collate: Callable[[Sequence[Any]], Any]) -> Any:
    first = batch[0]
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {key: _transpose([sample[key] for sample in batch], collate) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_transpose(column, collate) for column in zip(*batch, strict=True)))
    if isinstance(first, Sequence):
        sizes = sorted({len(sample) for sample in batch})
        if len(sizes) > 1:
            raise DataError(f"the samples of a batch have {sizes[0]} to {sizes[-1]} fields; all must have equally many")
        return [_transpose(column, collate) for column in zip(*batch, strict=True)]
    return collate(batch)


# Samplers: the order of samples, and their distribution over ranks.


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler[int]):
    """One pass per epoch, in an order by seed and epoch; each of n ranks reads every n-th sample of it."""

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
        if self.round_up and count:  # the first samples are repeated, so that ranks have equally many
            order = (order * math.ceil(self.total_size / count))[: self.total_size]
        begin, self._skipped = self._skipped, 0
        return iter(order[self.rank : self.total_size : self.world_size][begin:])

    def skip(self, samples: int) -> None:
        """Skip the first `samples` samples of this rank in the next pass."""
        self._skipped = samples

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler[int]):
    """Passes over the data set without end, for training loops that count iterations."""

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
        """Skip the first `samples` samples of this rank."""
        self._skipped = samples

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: there are no epochs."""


# Random state of data loader workers.


@FUNCTIONS.register_module()
def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, disable_subprocess_warning: bool = False
) -> None:
    """Seed a worker's generators; each worker of each rank has a different seed."""
    worker_seed = (num_workers * rank + worker_id + seed) % 2**32
    random.seed(worker_seed)
    np.random.seed(worker_seed)
    torch.manual_seed(worker_seed)
    if disable_subprocess_warning and worker_id != 0:
        warnings.simplefilter("ignore")


# `train_dataloader=dict(dataset=…, sampler=…, batch_size=…)`.


class FirstOf:
    """A data set of the first `length` samples of another one, whose other attributes it has."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset = dataset
        self._length = min(length, len(dataset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return self._length


def build_dataloader(
    cfg: Any, *, seed: int | None = None, diff_rank_seed: bool = False, start_method: str | None = None
) -> Any:
    """Return the loader that a dict describes; a loader is returned unchanged."""
    if not isinstance(cfg, Mapping):
        return cfg
    options = dict(cfg)
    dataset = _dataset(options)
    sampler = _sampler(options, dataset, None if diff_rank_seed else seed)
    grouped = options.pop("batch_sampler", None)
    if isinstance(grouped, Mapping):
        more = {"sampler": sampler, "batch_size": options.pop("batch_size", 1)}
        grouped = DATA_SAMPLERS.build(grouped, default_args=more)
    chosen = {"batch_sampler": grouped} if grouped is not None else {"sampler": sampler}
    workers = int(options.get("num_workers", 0))
    init = _worker_init(options, workers, seed)
    collate = _function(options.pop("collate_fn", {"type": "pseudo_collate"}), "collate_fn")
    if workers and start_method is not None:
        options.setdefault("multiprocessing_context", start_method)
    check_arguments("dataloader", DataLoader, options)
    # A separate generator: each pass draws a number at its start, which must not change the model's dropout.
    options.setdefault("generator", torch.Generator().manual_seed(seed or 0))
    return DataLoader(dataset, collate_fn=collate, worker_init_fn=init, **chosen, **options)


def _dataset(options: dict[str, Any]) -> Any:
    if "dataset" not in options:
        raise ConfigError(Problem("dataloader.dataset", "is missing", "Set a data set, or a dict with a type."))
    dataset = DATASETS.build(options.pop("dataset"))
    if hasattr(dataset, "full_init"):
        dataset.full_init()
    batches = options.pop("num_batch_per_epoch", None)
    if batches is not None:
        dataset = FirstOf(dataset, int(batches) * int(options.get("batch_size", 1)) * get_world_size())
    return dataset


def _sampler(options: dict[str, Any], dataset: Any, seed: int | None) -> Any:
    sampler = options.pop("sampler", None)
    if sampler is None and options.get("batch_sampler") is None:
        message = "is missing: without a sampler every rank would see the same samples"
        remedy = "Write sampler=dict(type='DefaultSampler', shuffle=True)."
        raise ConfigError(Problem("dataloader.sampler", message, remedy))
    return DATA_SAMPLERS.build(sampler, default_args={"dataset": dataset, "seed": seed})


def _worker_init(options: dict[str, Any], workers: int, seed: int | None) -> Any:
    quiet = bool(options.pop("disable_subprocess_warning", False))
    given = options.pop("worker_init_fn", None)
    if given is not None:
        return _function(given, "worker_init_fn")
    if seed is None:
        return None
    return partial(worker_init_fn, num_workers=workers, rank=get_rank(), seed=seed, disable_subprocess_warning=quiet)


def _function(given: Any, key: str) -> Any:
    """Return a function; it is given as a function, or as a dict with its name and options."""
    if isinstance(given, Mapping):
        options = dict(given)
        target = options.pop("type", None)
        function = FUNCTIONS.get(target) if isinstance(target, str) else target
        given = partial(function, **options) if options and callable(function) else function
    if not callable(given):
        message = f"{given!r} is not a function"
        raise ConfigError(Problem(f"dataloader.{key}", message, "Set a function, or a dict with its name as `type`."))
    return given
