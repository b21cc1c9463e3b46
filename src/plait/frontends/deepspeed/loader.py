"""The data loader that `deepspeed.initialize(training_data=…)` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from plait.data import WorkerExits
from plait.distributed import World
from plait.errors import DataError

_WORKERS = 2
"""Worker processes per rank if there is a GPU, as in DeepSpeed."""


class DeepSpeedDataLoader:
    """Yields micro-batches of this rank's part of a data set.

    The order is that of torch's DistributedSampler, the same in every epoch unless the script calls
    `data_sampler.set_epoch`. An iterable data set must itself give each rank its part.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        world: World,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Sampler[Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_local_io_workers: int | None = None,
    ) -> None:
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(f"training_data is a {type(dataset).__name__}; a torch Dataset was expected")
        if data_sampler is None and not iterable:
            replicas = world.layout.data_parallel
            data_sampler = DistributedSampler(dataset, num_replicas=replicas, rank=world.data_rank, shuffle=shuffle)
        on_device = world.device.type != "cpu"
        workers = (_WORKERS if on_device else 0) if num_local_io_workers is None else num_local_io_workers
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.post_process_func: Callable[[Any, Any], Any] | None = None
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=workers,
            pin_memory=on_device and torch.cuda.is_available(),
        )

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch in WorkerExits().read(self.dataloader):
            post = self.post_process_func
            yield batch if post is None else post(batch, getattr(self.data_sampler, "state_dict", dict)())


class RepeatingLoader:
    """An endless iterator, which starts a loader again at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
