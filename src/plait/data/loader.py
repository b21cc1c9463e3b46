"""Loading: from a dataset to the micro-batches of each step."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from plait.config import counted
from plait.data.order import SampleOrder, sample_seed
from plait.data.steps import BatchSizes, MicroBatch, RankShare, StepSamples, micro_batches, split_evenly
from plait.errors import DataError

# Samples to one micro-batch, and micro-batches to pinned memory.


Collate = Callable[[list[Any]], Any]


def stack(items: list[Any]) -> Any:
    """Return what torch's `default_collate` does, faster for mappings and tuples of tensors."""
    first = items[0]
    try:
        if type(first) is dict and all(type(value) is Tensor for value in first.values()):
            return {key: torch.stack([item[key] for item in items]) for key in first}
        if type(first) is tuple and all(type(value) is Tensor for value in first):
            return [torch.stack(column) for column in zip(*items, strict=True)]
        return default_collate(items)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{len(items)} samples of type {type(first).__name__} cannot be stacked into one micro-batch: "
            f"{error}; make them alike, or give a collate function"
        ) from error


def as_is(value: Any) -> Any:
    """Return the value: the collate function of a DataLoader whose items are micro-batches, which it would convert."""
    return value


def pin(value: Any) -> Any:
    """Return the same structure with every tensor in pinned memory."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pin(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pin, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(pin, value))
    return value


class WholeBatchCollate:
    """A collate function for datasets whose items are whole batches: it applies `convert` to the single item."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        """Return the converted item."""
        (item,) = items
        return self._convert(item)


# From sample ids to the inputs of one micro-batch, in this process or in a worker.


class BatchReader:
    """Reads samples by their ids and collates them into the inputs of one micro-batch."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate
        self.many = getattr(dataset, "__getitems__", None)

    def __call__(self, ids: list[int]) -> Any:
        """Return the collated samples."""
        if self.many is not None:
            return self.collate(self.many(ids))
        dataset = self.dataset
        return self.collate([dataset[index] for index in ids])


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the dataset's `set_epoch`, if it has one."""
    method = getattr(dataset, "set_epoch", None)
    if method is not None:
        method(epoch)


class WorkerDataset(Dataset[Any]):
    """The dataset of a worker process: its keys are `(epoch, ids)`, its items whole micro-batches.

    The epoch is part of the key because a worker outlives an epoch and is not notified of a new one.
    Before each sample the worker's generators (torch, numpy, random) are seeded from (seed, epoch, index):
    a dataset that uses them gives the same samples for any number of ranks and workers, and after a resume.
    Where the dataset reads many samples at once (`__getitems__`), the first of them determines the seed.
    """

    def __init__(self, fetch: BatchReader, seed: int) -> None:
        self._fetch = fetch
        self._seed = seed
        self._epoch: int | None = None

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, ids = key
        if epoch != self._epoch:
            set_epoch(self._fetch.dataset, epoch)
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


# The exit codes of worker processes, which torch's error does not have.


T = TypeVar("T")


class WorkerExits:
    """Reads from a `DataLoader`, and adds to its error the signal or exit code of workers that ended.

    The notes have torch's wording, which the failure diagnosis recognizes.
    """

    def __init__(self) -> None:
        self._workers: set[BaseProcess] = set()

    def read(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's items."""
        before = set(active_children())
        items = iter(loader)
        self._workers |= set(active_children()) - before  # persistent workers were added in an earlier epoch
        try:
            yield from items
        except RuntimeError as error:
            for worker in self._workers:
                code = worker.exitcode
                if code:
                    how = (
                        f"is killed by signal: {signal.strsignal(-code)}." if code < 0 else f"exited with code {code}."
                    )
                    error.add_note(f"DataLoader worker (pid {worker.pid}) {how}")
            raise


# Loading from a dataset with indices: in this process, or prefetched by worker processes.


class InProcessLoader:
    """Reads in this process, without prefetching."""

    def __init__(self, fetch: BatchReader, steps: StepSamples, *, pin_memory: bool) -> None:
        self._fetch = fetch
        self._steps = steps
        self._pin = pin_memory

    def epoch(self, epoch: int, start: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step of an epoch, from step `start` on."""
        set_epoch(self._fetch.dataset, epoch)
        fetch = self._fetch
        for step in self._steps.steps_from(epoch, start):
            if self._pin:
                yield [MicroBatch(pin(fetch(ids)), samples) for ids, samples in step]
            else:
                yield [MicroBatch(fetch(ids), samples) for ids, samples in step]

    def close(self) -> None:
        """Do nothing: no resource is held."""


class WorkerLoader:
    """Prefetches in worker processes that live as long as this object.

    The workers get the same ids in the same order as `InProcessLoader`, so their number does not change the batches.
    Only the newest epoch can be read: starting another one ends it.
    """

    def __init__(
        self,
        fetch: BatchReader,
        steps: StepSamples,
        *,
        seed: int,
        workers: int,
        pin_memory: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._steps = steps
        self._keys = _MicroBatchKeys(steps)
        self._turn = 0
        self._worker_exits = WorkerExits()
        self._loader: DataLoader[Any] | None = DataLoader(
            WorkerDataset(fetch, seed),
            batch_size=None,
            sampler=self._keys,
            collate_fn=as_is,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=True,
            generator=torch.Generator(),  # the global generator must not depend on where a run was resumed
            **options,
        )

    def epoch(self, epoch: int, start: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step of an epoch, from step `start` on."""
        if self._loader is None:
            raise DataError("this loader was closed; make a new one")
        self._turn += 1
        turn = self._turn
        self._keys.epoch, self._keys.start = epoch, start
        inputs = self._worker_exits.read(self._loader)
        for step in self._steps.steps_from(epoch, start):
            yield [MicroBatch(next(inputs), samples) for _, samples in step]
            if turn != self._turn:
                raise DataError(
                    f"epoch {epoch} was ended by starting another one; a loader with workers reads one epoch at a time"
                )

    def close(self) -> None:
        """Stop the workers."""
        self._turn += 1
        self._loader = None


class _MicroBatchKeys(Sampler[tuple[int, list[int]]]):
    """Yields the keys of micro-batches for the workers, from step `start` of `epoch`."""

    def __init__(self, steps: StepSamples) -> None:
        self._steps = steps
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.epoch
        for step in self._steps.steps_from(epoch, self.start):
            for ids, _ in step:
                yield epoch, ids


# Loading from a stream, which can only be read from its start, one sample after another.
#
# Every rank reads the whole stream and keeps every `ranks`-th sample. That costs reading, but each rank then
# knows how many samples the global batch has, so all of them end at the same step without communication, and the
# global batches do not depend on the number of ranks.


StepInputs = list[tuple[Any, int]]
"""Inputs and number of counted samples of each micro-batch of a step."""


class StreamLoader:
    """Reads a stream in this process, or prefetches it in one worker."""

    def __init__(
        self,
        source: Iterable[Any],
        collate: Collate,
        share: RankShare,
        *,
        drop_last: bool,
        workers: int,
        pin_memory: bool,
        options: Mapping[str, Any],
    ) -> None:
        if workers > 1:
            raise DataError(
                f"workers is {workers}, but a stream ({type(source).__name__}) is read in order by one "
                "process: several would each read all of it; set workers to 0 or 1, or use a data set "
                "with __getitem__ and __len__"
            )
        self._source = source
        self._once = isinstance(source, Iterator)
        self._spent = False
        self._collate = collate
        self._share = share
        self._drop_last = drop_last
        self._workers = workers
        self._pin = pin_memory
        self._options = options

    def epoch(self, epoch: int, start: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step of an epoch; the samples before step `start` are read and skipped."""
        if self._once and self._spent:
            raise DataError(
                f"the stream is a {type(self._source).__name__}, which can be read only once: use an "
                "object whose __iter__ starts again, or train for one epoch"
            )
        self._spent = True
        reader = _StreamSteps(self._source, self._collate, self._share, self._drop_last, epoch, start)
        if self._workers:
            loader: Iterable[StepInputs] = DataLoader(
                reader,
                batch_size=None,
                collate_fn=as_is,
                num_workers=1,
                pin_memory=self._pin,
                generator=torch.Generator(),  # the global generator must not depend on where a run was resumed
                **self._options,
            )
            for step in WorkerExits().read(loader):
                yield [MicroBatch(inputs, samples) for inputs, samples in step]
        else:
            for step in reader:
                yield [MicroBatch(pin(inputs) if self._pin else inputs, samples) for inputs, samples in step]

    def close(self) -> None:
        """Do nothing: no resource outlives an epoch."""


class _StreamSteps(IterableDataset[StepInputs]):
    """Yields the inputs of each step of one epoch, on one rank, from step `start` on."""

    def __init__(
        self,
        source: Iterable[Any],
        collate: Collate,
        share: RankShare,
        drop_last: bool,
        epoch: int,
        start: int,
    ) -> None:
        self._source = source
        self._collate = collate
        self._share = share
        self._drop_last = drop_last
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[StepInputs]:
        set_epoch(self._source, self._epoch)
        total = self._share.total
        items = iter(self._source)
        deque(islice(items, self._start * total), maxlen=0)
        while True:
            first, mine, count = self._take(items)
            if count == 0 or (count < total and self._drop_last):
                return
            yield self._step_inputs(first, mine, count)
            if count < total:
                return

    def _take(self, items: Iterator[Any]) -> tuple[Any, list[Any], int]:
        """Return the first sample of the next global batch, this rank's samples of it, and its size."""
        first, mine, count = None, [], 0
        for item in islice(items, self._share.total):
            if count == 0:
                first = item
            if count % self._share.ranks == self._share.rank:
                mine.append(item)
            count += 1
        return first, mine, count

    def _step_inputs(self, first: Any, mine: list[Any], count: int) -> StepInputs:
        micro_count = micro_batches(count, ranks=self._share.ranks, micro=self._share.micro)
        return [
            (self._collate(mine[a:b]), b - a) if b > a else (self._collate([first]), 0)
            for a, b in split_evenly(0, len(mine), micro_count)
        ]


class RankLoader:
    """Loads the micro-batches of one rank, step by step.

    The samples of a global batch depend on (seed, epoch, step) alone: not on ranks, workers or the size of
    a micro-batch. The caller keeps the position: to resume after step `s` of epoch `e`, call
    `epoch(e, s + 1)`, which costs no more than the first epoch. All ranks have the same number of steps, and
    in each step the same number of micro-batches; a rank without samples left gets an empty micro-batch.

    `dataset` is a torch dataset, a sequence or anything with `__getitem__` and `__len__`; or a
    stream (an `IterableDataset` or another iterable), which is read in its own order, has no known length,
    and is read again up to the step that is resumed. An item counts as one sample.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int,
        ranks: int,
        batch: BatchSizes,
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Collate | None = None,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`worker_options` are passed to torch's DataLoader, for example `prefetch_factor`."""
        if pin_memory and not torch.accelerator.is_available():
            raise DataError("pin_memory is true, but this machine has no accelerator: leave it out")
        if isinstance(dataset, DataLoader):
            raise DataError("a torch DataLoader was given as a dataset: use RankLoader.from_dataloader")
        share = RankShare.of(batch, rank=rank, ranks=ranks)
        options = dict(worker_options or {})
        collate = collate or stack
        self.dataset = dataset
        self._steps: StepSamples | None = None
        self._loader: InProcessLoader | WorkerLoader | StreamLoader
        if is_stream(dataset):
            if shuffle:
                raise DataError(
                    f"shuffle is true, but a {type(dataset).__name__} is a stream and has only its own order: "
                    "set shuffle to false and shuffle inside the stream"
                )
            self._loader = StreamLoader(
                dataset,
                collate,
                share,
                drop_last=drop_last,
                workers=workers,
                pin_memory=pin_memory,
                options=options,
            )
            return
        self._steps = StepSamples(SampleOrder(_length(dataset), seed, shuffle), share, drop_last)
        if len(self._steps) == 0:
            raise DataError(
                f"drop_last drops everything: the dataset has {counted(self._steps.order.length, 'sample')} and "
                f"batch.total is {batch.total}; set drop_last to false or make the batch smaller"
            )
        fetch = BatchReader(dataset, collate)
        if workers:
            self._loader = WorkerLoader(
                fetch, self._steps, seed=seed, workers=workers, pin_memory=pin_memory, options=options
            )
        else:
            self._loader = InProcessLoader(fetch, self._steps, pin_memory=pin_memory)

    @classmethod
    def from_dataloader(
        cls,
        loader: DataLoader[Any],
        *,
        rank: int,
        ranks: int,
        batch: BatchSizes,
        seed: int,
        split: bool = False,
    ) -> RankLoader:
        """Return a loader for the dataset of a torch DataLoader, with its settings, in Plait's sample order.

        `batch.micro` must be the DataLoader's batch size (see `plait.data.unwrap_dataloader`), or less with `split`.
        """
        settings = unwrap_dataloader(loader)
        if batch.micro != settings.micro and not (split and batch.micro < settings.micro):
            raise DataError(
                f"batch.micro is {batch.micro}, but the DataLoader's batch_size is {settings.micro}: "
                "they mean the same thing, leave one out or make them equal"
            )
        return cls(
            settings.dataset,
            rank=rank,
            ranks=ranks,
            batch=batch,
            seed=seed,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            workers=settings.workers,
            pin_memory=settings.pin_memory,
            collate=settings.collate,
            worker_options=settings.worker_options,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps in an epoch; None for a stream."""
        return None if self._steps is None else len(self._steps)

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of an epoch, over all ranks; None for a stream."""
        if self._steps is None:
            return None
        return min(self._steps.order.length, len(self._steps) * self._steps.share.total)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of each step of an epoch, from `start_step` on."""
        steps = self.steps_per_epoch
        if start_step < 0 or (steps is not None and start_step > steps):
            raise DataError(
                f"cannot start at step {start_step} of an epoch of {steps} steps; "
                "has the dataset or the batch size changed?"
            )
        return self._loader.epoch(epoch, start_step)

    def sample_ids(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the samples of a step over all ranks, in the order of the global batch."""
        if self._steps is None:
            raise DataError(f"a {type(self.dataset).__name__} is a stream, whose samples have no ids")
        if not 0 <= step < len(self._steps):
            raise DataError(f"step {step} does not exist: an epoch has {len(self._steps)} steps")
        return self._steps.ids(epoch, step)

    def close(self) -> None:
        """Stop worker processes."""
        self._loader.close()


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from its start, in its own order."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise DataError(
        f"{type(dataset).__name__} is not a dataset: it needs __getitem__ and __len__, or __iter__ if it is a stream"
    )


def _length(dataset: Any) -> int:
    length = len(dataset)
    if length == 0:
        raise DataError(f"the dataset {type(dataset).__name__} is empty")
    return length


# The settings of a torch DataLoader, for `RankLoader.from_dataloader`.


@dataclass(frozen=True, slots=True)
class DataLoaderSettings:
    """The settings of a DataLoader that a `RankLoader` uses."""

    dataset: Any
    micro: int
    """Its batch size, which is the micro-batch size of a rank. 1 where its items are whole batches."""
    shuffle: bool
    drop_last: bool
    workers: int
    pin_memory: bool
    collate: Collate
    worker_options: Mapping[str, Any] = field(default_factory=dict)


def unwrap_dataloader(loader: DataLoader[Any]) -> DataLoaderSettings:
    """Return the settings of a DataLoader; raise a `DataError` if its order depends on the number of ranks."""
    batches = loader.batch_sampler
    micro, sampler, drop_last = loader.batch_size or 1, loader.sampler, loader.drop_last
    collate = loader.collate_fn
    if batches is None:
        collate = WholeBatchCollate(collate)
    elif type(batches) is BatchSampler:
        micro, sampler, drop_last = batches.batch_size, batches.sampler, batches.drop_last
    elif not isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the DataLoader has a custom batch_sampler ({type(batches).__name__}), which forms the batches of one "
            "process only; pass the dataset and let Plait form the batches"
        )
    dataset, shuffle = _order(loader.dataset, sampler)
    return DataLoaderSettings(
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
    """Return the dataset, restricted to the sampler's subset, and whether it is shuffled."""
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
            "the DataLoader's RandomSampler has replacement or num_samples, but Plait loads every sample once per "
            "epoch: leave replacement and num_samples out"
        )
    raise DataError(
        f"the DataLoader's sampler is a {type(sampler).__name__}; Plait supports SequentialSampler, RandomSampler, "
        "SubsetRandomSampler and DistributedSampler, whose order it makes independent of ranks. Pass the dataset "
        "alone, or one whose items are already in the order you want"
    )


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    options = {
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    return {key: value for key, value in options.items() if value}
