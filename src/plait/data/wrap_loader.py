"""What a torch DataLoader describes, taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from plait.data.collate import Collate, ReadyMade, stack
from plait.errors import DataError


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """The parts of a DataLoader that a `Loader` takes over."""

    dataset: Any
    micro: int
    """Its batch size: samples of one forward/backward on one rank. 1 where its items are whole batches."""
    shuffle: bool
    drop_last: bool
    workers: int
    pin_memory: bool
    collate: Collate
    worker_options: Mapping[str, Any] = field(default_factory=dict)


def adopt(loader: DataLoader[Any]) -> LoaderParts:
    """Take a DataLoader apart; refuse one whose order cannot be made independent of the ranks."""
    batches = loader.batch_sampler
    micro, sampler, drop_last = loader.batch_size or 1, loader.sampler, loader.drop_last
    collate = loader.collate_fn
    if batches is None:
        collate = ReadyMade(collate)
    elif type(batches) is BatchSampler:
        micro, sampler, drop_last = batches.batch_size, batches.sampler, batches.drop_last
    elif not isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the DataLoader has a batch_sampler of its own ({type(batches).__name__}), which decides batches "
            "for one process only; give the data set and let Plait form the batches"
        )
    dataset, shuffle = _order(loader.dataset, sampler)
    return LoaderParts(
        dataset=dataset,
        micro=micro,
        shuffle=shuffle,
        drop_last=drop_last or (isinstance(sampler, DistributedSampler) and sampler.drop_last),
        workers=loader.num_workers,
        pin_memory=bool(loader.pin_memory),
        collate=stack if collate is default_collate else collate,
        worker_options=_worker_options(loader) if loader.num_workers else {},
    )


def _order(dataset: Any, sampler: Any) -> tuple[Any, bool]:
    """The data set, narrowed where the sampler narrows it, and whether it is shuffled."""
    if isinstance(dataset, IterableDataset) or type(sampler) is SequentialSampler:
        return dataset, False
    if isinstance(sampler, DistributedSampler):
        return dataset, sampler.shuffle
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices)), True
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == len(dataset):
            return dataset, True
        raise DataError(
            "the DataLoader's RandomSampler draws with replacement or another number of samples than the data "
            "set has; Plait visits every sample once an epoch: leave replacement and num_samples out"
        )
    raise DataError(
        f"the DataLoader's sampler is a {type(sampler).__name__}; Plait can take over SequentialSampler, "
        "RandomSampler, SubsetRandomSampler and DistributedSampler, whose order it makes independent of "
        "ranks. Give the data set alone, or one whose items are already in the order you want"
    )


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    options = {
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    return {key: value for key, value in options.items() if value}
