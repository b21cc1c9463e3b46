"""Loading from a stream: something that can only be read from its start, one sample after another.

Every rank reads the whole stream and keeps every `ranks`-th sample. That costs reading, but each rank then
knows how many samples the global batch holds, so all of them end at the same step without a word to each
other, and the global batches do not depend on the number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from plait.data.collate import Collate, as_is, pin
from plait.data.cut import micro_batches, spread
from plait.data.fetch import tell_epoch
from plait.data.steps import Share
from plait.data.workers import WorkerEnds
from plait.errors import DataError
from plait.spec import MicroBatch

Parts = list[tuple[Any, int]]
"""Inputs and number of real samples of each micro-batch of a step."""


class Stream:
    """Reads a stream in this process, or in one worker ahead of training."""

    def __init__(
        self,
        source: Iterable[Any],
        collate: Collate,
        share: Share,
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
        share: Share,
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
