"""Loading from a data set that can be indexed: inline, or ahead of time in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from plait.data.collate import as_is, pin
from plait.data.fetch import Fetch, WorkerFetch, tell_epoch
from plait.data.steps import Steps
from plait.data.workers import WorkerEnds
from plait.errors import DataError
from plait.spec import MicroBatch


class Inline:
    """Reads in this process: a list comprehension and nothing else between the data set and the step."""

    def __init__(self, fetch: Fetch, steps: Steps, *, pin_memory: bool) -> None:
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
        steps: Steps,
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

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.epoch = 0
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.epoch
        for step in self._steps.walk(epoch, self.start):
            for ids, _ in step:
                yield epoch, ids
