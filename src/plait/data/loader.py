"""The one way from a data set to the micro-batches of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from plait.config import counted
from plait.data.adopt import adopt
from plait.data.collate import Collate, stack
from plait.data.fetch import Fetch
from plait.data.indexed import Inline, Workers
from plait.data.order import SampleOrder
from plait.data.steps import BatchSizes, Share, Steps
from plait.data.stream import Stream
from plait.errors import DataError
from plait.spec import MicroBatch


class Loader:
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
        share = Share.of(batch, rank=rank, ranks=ranks)
        options = dict(worker_options or {})
        collate = collate or stack
        self.dataset = dataset
        self._steps: Steps | None = None
        self._reader: Inline | Workers | Stream
        if is_stream(dataset):
            if shuffle:
                raise DataError(
                    f"shuffle is true, but a {type(dataset).__name__} is a stream and has only its own order: "
                    "set shuffle to false and shuffle inside the stream"
                )
            self._reader = Stream(
                dataset,
                collate,
                share,
                drop_last=drop_last,
                workers=workers,
                pin_memory=pin_memory,
                options=options,
            )
            return
        self._steps = Steps(SampleOrder(_length(dataset), seed, shuffle), share, drop_last)
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
    ) -> Loader:
        """Load what a torch DataLoader describes, in this package's rank-free order.

        `batch.micro` must be the DataLoader's batch size (see `plait.data.adopt.adopt`), or less with `split`.
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
