"""The one way from a data set to the micro-batches of each step."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from plait.config import counted
from plait.data.collate import Collate, as_is, pin, stack
from plait.data.order import SampleOrder, sample_seed
from plait.data.steps import BatchSizes, MicroBatch, RankShare, StepSamples, micro_batches, spread
from plait.data.wrap_loader import adopt
from plait.errors import DataError

# From sample ids to the inputs of one micro-batch, the same in this process and in a worker.


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


# Processes that read data: how one of them ended, where torch only says that it did.


T = TypeVar("T")


class WorkerEnds:
    """Reads from a `DataLoader`, and notes on its error which signal or exit code its workers ended with.

    In torch's words: whoever explains a failed run knows them already.
    """

    def __init__(self) -> None:
        self._workers: set[BaseProcess] = set()

    def read(self, loader: Iterable[T]) -> Iterator[T]:
        """What the loader gives."""
        before = set(active_children())
        items = iter(loader)
        self._workers |= set(active_children()) - before  # those that stay from epoch to epoch are known already
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


# Loading from a data set that can be indexed: inline, or ahead of time in worker processes.


class Inline:
    """Reads in this process: a list comprehension and nothing else between the data set and the step."""

    def __init__(self, fetch: Fetch, steps: StepSamples, *, pin_memory: bool) -> None:
        self._fetch = fetch
        self._steps = steps
        self._pin = pin_memory

    def epoch(self, epoch: int, start: int) -> Iterator[list[MicroBatch]]:
        """The rest of an epoch."""
        tell_epoch(self._fetch.dataset, epoch)
        fetch = self._fetch
        for step in self._steps.walk(epoch, start):
            if self._pin:
                yield [MicroBatch(pin(fetch(ids)), samples) for ids, samples in step]
            else:
                yield [MicroBatch(fetch(ids), samples) for ids, samples in step]

    def close(self) -> None:
        """Nothing is held."""


class Workers:
    """Reads ahead in worker processes that live as long as this object does.

    The workers get the very same ids in the same order as `Inline` would, so their number changes nothing.
    Only the newest epoch can be read: starting another one takes the workers away from it.
    """

    def __init__(
        self,
        fetch: Fetch,
        steps: StepSamples,
        *,
        seed: int,
        workers: int,
        pin_memory: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._steps = steps
        self._keys = _Keys(steps)
        self._turn = 0
        self._ends = WorkerEnds()
        self._loader: DataLoader[Any] | None = DataLoader(
            WorkerFetch(fetch, seed),
            batch_size=None,
            sampler=self._keys,
            collate_fn=as_is,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=True,
            generator=torch.Generator(),  # not the global one: a resumed epoch must not cost it a number
            **options,
        )

    def epoch(self, epoch: int, start: int) -> Iterator[list[MicroBatch]]:
        """The rest of an epoch."""
        if self._loader is None:
            raise DataError("this loader was closed; make a new one")
        self._turn += 1
        turn = self._turn
        self._keys.epoch, self._keys.start = epoch, start
        inputs = self._ends.read(self._loader)
        for step in self._steps.walk(epoch, start):
            yield [MicroBatch(next(inputs), samples) for _, samples in step]
            if turn != self._turn:
                raise DataError(
                    f"epoch {epoch} was left for another one; a loader with workers reads one epoch at a time"
                )

    def close(self) -> None:
        """Let the workers go."""
        self._turn += 1
        self._loader = None


class _Keys(Sampler[tuple[int, list[int]]]):
    """What the workers are asked for, micro-batch by micro-batch, from wherever `epoch` and `start` say."""

    def __init__(self, steps: StepSamples) -> None:
        self._steps = steps
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.epoch
        for step in self._steps.walk(epoch, self.start):
            for ids, _ in step:
                yield epoch, ids


# Loading from a stream: something that can only be read from its start, one sample after another.
#
# Every rank reads the whole stream and keeps every `ranks`-th sample. That costs reading, but each rank then
# knows how many samples the global batch holds, so all of them end at the same step without a word to each
# other, and the global batches do not depend on the number of ranks.


Parts = list[tuple[Any, int]]
"""Inputs and number of real samples of each micro-batch of a step."""


class StreamLoader:
    """Reads a stream in this process, or in one worker ahead of training."""

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
        """The rest of an epoch; the samples before `start` are read and thrown away."""
        if self._once and self._spent:
            raise DataError(
                f"the stream is a {type(self._source).__name__}, which can be read only once: give an "
                "object whose __iter__ starts again, or train for one epoch"
            )
        self._spent = True
        reader = _Reader(self._source, self._collate, self._share, self._drop_last, epoch, start)
        if self._workers:
            loader: Iterable[Parts] = DataLoader(
                reader,
                batch_size=None,
                collate_fn=as_is,
                num_workers=1,
                pin_memory=self._pin,
                generator=torch.Generator(),  # not the global one: a resumed epoch must not cost it a number
                **self._options,
            )
            for parts in WorkerEnds().read(loader):
                yield [MicroBatch(inputs, samples) for inputs, samples in parts]
        else:
            for parts in reader:
                yield [MicroBatch(pin(inputs) if self._pin else inputs, samples) for inputs, samples in parts]

    def close(self) -> None:
        """Nothing outlives an epoch."""


class _Reader(IterableDataset[Parts]):
    """One epoch's steps of one rank."""

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

    def __iter__(self) -> Iterator[Parts]:
        tell_epoch(self._source, self._epoch)
        total = self._share.total
        items = iter(self._source)
        deque(islice(items, self._start * total), maxlen=0)
        while True:
            first, own, count = self._take(items)
            if count == 0 or (count < total and self._drop_last):
                return
            yield self._parts(first, own, count)
            if count < total:
                return

    def _take(self, items: Iterator[Any]) -> tuple[Any, list[Any], int]:
        """The first sample of the next global batch, this rank's samples of it, and its size."""
        first, own, count = None, [], 0
        for item in islice(items, self._share.total):
            if count == 0:
                first = item
            if count % self._share.ranks == self._share.rank:
                own.append(item)
            count += 1
        return first, own, count

    def _parts(self, first: Any, own: list[Any], count: int) -> Parts:
        parts = micro_batches(count, ranks=self._share.ranks, micro=self._share.micro)
        return [
            (self._collate(own[a:b]), b - a) if b > a else (self._collate([first]), 0)
            for a, b in spread(0, len(own), parts)
        ]


class RankLoader:
    """Gives one rank its micro-batches, step by step.

    The samples of a global batch depend on (seed, epoch, step) alone: not on ranks, workers or the size of
    a micro-batch. The position is the caller's: to go on after step `s` of epoch `e` is to ask for
    `epoch(e, s + 1)`, which costs no more than asking for the first one. All ranks see the same number of
    steps, and in each step the same number of micro-batches; a rank that has no sample left gets a filler.

    `dataset` is a torch data set, a sequence or anything with `__getitem__` and `__len__`; or a
    stream (an `IterableDataset` or another iterable), which is read in its own order, has no known length,
    and is read again up to the step that a resume asks for. An item counts as one sample.
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
        """`worker_options` goes to torch's DataLoader, for example `prefetch_factor`."""
        if pin_memory and not torch.accelerator.is_available():
            raise DataError("pin_memory is true, but there is no accelerator to pin memory for: leave it out")
        if isinstance(dataset, DataLoader):
            raise DataError("a torch DataLoader was given as a data set: use Loader.from_dataloader")
        share = RankShare.of(batch, rank=rank, ranks=ranks)
        options = dict(worker_options or {})
        collate = collate or stack
        self.dataset = dataset
        self._steps: StepSamples | None = None
        self._reader: Inline | Workers | StreamLoader
        if is_stream(dataset):
            if shuffle:
                raise DataError(
                    f"shuffle is true, but a {type(dataset).__name__} is a stream and has only its own order: "
                    "set shuffle to false and shuffle inside the stream"
                )
            self._reader = StreamLoader(
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
                f"drop_last leaves nothing: the data set has {counted(self._steps.order.length, 'sample')} and "
                f"batch.total is {batch.total}; set drop_last to false or make the batch smaller"
            )
        fetch = Fetch(dataset, collate)
        if workers:
            self._reader = Workers(
                fetch, self._steps, seed=seed, workers=workers, pin_memory=pin_memory, options=options
            )
        else:
            self._reader = Inline(fetch, self._steps, pin_memory=pin_memory)

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
        """Load what a torch DataLoader describes, in this package's rank-free order.

        `batch.micro` must be the DataLoader's batch size (see `plait.data.wrap_loader.adopt`), or less with `split`.
        """
        parts = adopt(loader)
        if batch.micro != parts.micro and not (split and batch.micro < parts.micro):
            raise DataError(
                f"batch.micro is {batch.micro}, but the DataLoader's batch_size is {parts.micro}: "
                "they mean the same thing, leave one out or make them equal"
            )
        return cls(
            parts.dataset,
            rank=rank,
            ranks=ranks,
            batch=batch,
            seed=seed,
            shuffle=parts.shuffle,
            drop_last=parts.drop_last,
            workers=parts.workers,
            pin_memory=parts.pin_memory,
            collate=parts.collate,
            worker_options=parts.worker_options,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in an epoch; None for a stream."""
        return None if self._steps is None else len(self._steps)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that an epoch visits, over all ranks; None for a stream."""
        if self._steps is None:
            return None
        return min(self._steps.order.length, len(self._steps) * self._steps.share.total)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of an epoch, from `start_step` on."""
        steps = self.steps_per_epoch
        if start_step < 0 or (steps is not None and start_step > steps):
            raise DataError(
                f"cannot start at step {start_step} of an epoch of {steps} steps; "
                "has the data set or the batch size changed?"
            )
        return self._reader.epoch(epoch, start_step)

    def sample_ids(self, epoch: int, step: int) -> NDArray[np.int64]:
        """The samples of a step over all ranks, in the order of the global batch."""
        if self._steps is None:
            raise DataError(f"a {type(self.dataset).__name__} is a stream: its samples have no ids")
        if not 0 <= step < len(self._steps):
            raise DataError(f"there is no step {step}: an epoch has {len(self._steps)} steps")
        return self._steps.ids(epoch, step)

    def close(self) -> None:
        """Let worker processes go."""
        self._reader.close()


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be read from its start, in its own order."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise DataError(
        f"{type(dataset).__name__} is no data set: it needs __getitem__ and __len__, or __iter__ if it is a stream"
    )


def _length(dataset: Any) -> int:
    length = len(dataset)
    if length == 0:
        raise DataError(f"the data set {type(dataset).__name__} is empty")
    return length
