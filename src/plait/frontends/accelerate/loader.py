"""The loader of one rank: its share of the batches, on its device, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from plait.errors import ConfigError, DataError, Problem, TrainingError
from plait.frontends.accelerate.gradients import GradientState
from plait.frontends.accelerate.prepared import apply
from plait.frontends.accelerate.sharing import (
    RecordedSampler,
    SeedableSampler,
    Share,
    ShareDataset,
    ShareSampler,
    SkippingSampler,
)
from plait.world import World

_COPIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a rank's batches reach it."""

    share: Share
    device: torch.device | None = None
    """Where they go; None: they stay where they are."""
    non_blocking: bool = False
    dispatch: bool = False
    """Rank 0 reads for all."""
    skip: int = 0
    """Batches at the beginning of a pass that are left out."""


class PreparedLoader(DataLoader[Any]):
    """The user's loader, read by one of several ranks; batches are on the device."""

    def __init__(self, loader: DataLoader[Any], delivery: Delivery, world: World, gradients: GradientState) -> None:
        self.loader = loader
        self.delivery = delivery
        self.end_of_dataloader = False
        self.remainder = -1
        """Samples of the last round of batches that are no repetitions; -1 where that is not known."""
        self.iteration = 0
        """Complete passes."""
        self.position = 0
        """Rounds of batches of this pass that were given out."""
        self.resume_at = 0
        """Samples that a loaded state had seen of its pass."""
        self._order: Tensor | None = None
        """State of the sampler's generator at the beginning of this pass."""
        self._again = False
        """Whether the next pass goes in that order."""
        self._origin: PreparedLoader | None = None
        """The loader of the whole pass, where this one leaves out its beginning."""
        self._world, self._gradients = world, gradients
        given = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
        if given["num_workers"] == 0:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                given.pop(name, None)
        share, dataset = delivery.share, loader.dataset
        self._reads_to_skip = True
        if isinstance(dataset, IterableDataset):
            size = loader.batch_size or 1
            if share.ranks > 1 and not delivery.dispatch:
                dataset = ShareDataset(dataset, share, size, drop_last=loader.drop_last)
                size = size // share.ranks if share.split else size
            super().__init__(dataset, batch_size=size, drop_last=loader.drop_last, **given)
            return
        batches: Any = loader.batch_sampler
        if batches is None:
            raise DataError("a DataLoader without batches (batch_size=None) cannot be spread over ranks")
        if not delivery.dispatch:
            batches = ShareSampler(batches, share) if share.ranks > 1 else batches
            batches = SkippingSampler(batches, delivery.skip) if delivery.skip else batches
            self._reads_to_skip = False
        super().__init__(dataset, batch_sampler=batches, **given)

    # ---- the pass over the data

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resumes = self._again
        self._begin()
        numbers = torch.get_rng_state()
        batches = self._dispatched() if self.delivery.dispatch else super().__iter__()
        if resumes:  # torch draws a seed for workers; the pass that is gone on with has drawn its own
            torch.set_rng_state(numbers)
        current = next(batches, None)
        try:
            while current is not None:
                following = next(batches, None)  # one ahead, to know the last one when it is given out
                self.end_of_dataloader = following is None
                self.position += 1
                if self.position > self.delivery.skip or not self._reads_to_skip:
                    yield self._placed(current)
                current = following
            self.iteration += 1
            self.position = 0
            if self._origin is not None:
                self._origin.iteration = self.iteration
        finally:
            self._gradients.loaders.remove(self)

    def _begin(self) -> None:
        self.end_of_dataloader, self.remainder = False, -1
        self.position = 0 if self._reads_to_skip else self.delivery.skip
        generator, sampler = self._generator, self.user_sampler
        if isinstance(sampler, RecordedSampler):
            sampler.again = self._order if self._again else None
        elif generator is not None:
            if self._again and self._order is not None:
                generator.set_state(self._order)
            elif self.delivery.share.ranks > 1:
                generator.set_state(self._world.broadcast(generator.get_state()))
            self._order = generator.get_state()
        self._again = False
        if self._origin is not None:
            self._origin._again = False
        self.set_epoch(self.iteration)
        if not self.loader.drop_last:
            try:
                self.remainder = self.total_dataset_length % self.total_batch_size
            except TypeError:
                self.remainder = -1  # a stream without a length
        self._gradients.loaders.append(self)

    def _placed(self, batch: Any) -> Any:
        device, non_blocking = self.delivery.device, self.delivery.non_blocking
        if device is None:
            return batch
        return apply(lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)

    def _dispatched(self) -> Iterator[Any]:
        """Rank 0 reads a round of batches and hands it to all; each cuts its piece."""
        share = self.delivery.share
        source = super().__iter__() if self._world.is_main else None
        first: Any = None
        while True:
            group = None
            if source is not None:
                found = list(islice(source, 1 if share.split else share.ranks))
                group = _joined(found) if found else None
            group = self._world.broadcast(group)
            if group is None:
                return
            first = group if first is None else first
            size = _length(group)
            self.remainder = size
            if size % share.ranks:
                if self.loader.drop_last:
                    return
                group = _joined([group, _cut(first, 0, share.ranks - size % share.ranks)])
            each = _length(group) // share.ranks
            yield _cut(group, each * share.rank, each * (share.rank + 1))

    # ---- where it stands

    @property
    def _generator(self) -> torch.Generator | None:
        """What the sampler draws from, where that is a generator of its own."""
        sampler = self.user_sampler
        own = isinstance(sampler, (SeedableSampler, RecordedSampler))
        found = None if own else getattr(sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def user_sampler(self) -> Any:
        """What the user's loader draws samples with."""
        return getattr(self.loader.batch_sampler, "sampler", None)

    @property
    def total_batch_size(self) -> int:
        """Samples in one round of batches, over all ranks."""
        size = self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None)
        if size is None:
            raise TypeError("batches of any length")
        return int(size) if self.delivery.share.split else int(size) * self.delivery.share.ranks

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, on all ranks together."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self.delivery.dispatch:
            share = self.delivery.share
            rounds, rest = (len(self.loader), 0) if share.split else divmod(len(self.loader), share.ranks)
            rounds += 1 if rest and not self.loader.drop_last else 0
        else:
            rounds = super().__len__()
        return rounds - self.delivery.skip if self._reads_to_skip else rounds

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass, for samplers and data sets that shuffle by it."""
        self.iteration = epoch
        owners: tuple[Any, ...] = (self.loader.batch_sampler, self.user_sampler, self.dataset)
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def without_first(self, count: int) -> PreparedLoader:
        """The same pass without its first batches. They are not read, except from a stream."""
        other = PreparedLoader(self.loader, replace(self.delivery, skip=count), self._world, self._gradients)
        other.iteration, other._order, other._again, other._origin = self.iteration, self._order, self._again, self
        return other

    def state(self) -> tuple[dict[str, Any], Tensor | None]:
        """The position, in samples, so that it means the same to any number of ranks; and the order of the pass."""
        try:
            samples = self.position * self.total_batch_size
        except TypeError:
            samples = 0
        generator, sampler = self._generator, self.user_sampler
        if isinstance(sampler, RecordedSampler):
            order = sampler.order if self.position else None  # the next pass draws one from torch's generator
        else:
            order = self._order if self.position or generator is None else generator.get_state()
        return {"iteration": self.iteration, "position": self.position, "samples": samples}, order

    def restore(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Have the next pass go in the order of the one that `state` was taken in."""
        self.iteration, self.resume_at = int(state["iteration"]), int(state["samples"])
        self._order, self._again = order, order is not None


def _cut(batch: Any, start: int, end: int) -> Any:
    return apply(lambda tensor: tensor[start:end], batch)


def _joined(batches: list[Any]) -> Any:
    """Batches of nested tensors as one."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return type(first)({key: _joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(_joined([batch[index] for batch in batches]) for index in range(len(first)))
    raise DataError(f"dispatch_batches cuts batches of tensors, not of {type(first).__name__}; set it to false")


def _length(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    return _length(next(iter(batch.values() if isinstance(batch, dict) else batch)))


def choose_delivery(
    loader: DataLoader[Any],
    share: Share,
    *,
    device: torch.device | None,
    non_blocking: bool,
    dispatch: bool | None,
) -> Delivery:
    """How the batches of a loader go to ranks: each reads its own, but of a stream rank 0 reads for all."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if share.split and share.ranks > 1 and (size is None or size % share.ranks):
        problem = f"batches of {size} samples cannot be cut into {share.ranks} equal pieces"
        raise ConfigError(Problem("split_batches", problem, "Make the batch size a multiple of the number of ranks."))
    if dispatch is None:
        dispatch = isinstance(loader.dataset, IterableDataset) and device is not None
    return Delivery(share, device, non_blocking, dispatch and share.ranks > 1)


def seed_sampler(loader: DataLoader[Any], *, ranks: int, seedable: bool, data_seed: int | None) -> None:
    """See to it that all ranks shuffle alike: from a seed and the epoch, or from a generator that they share."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(sampler, RandomSampler) or isinstance(loader.dataset, IterableDataset):
        return
    if seedable:
        seed = torch.initial_seed() if data_seed is None else data_seed
        loader.batch_sampler.sampler = SeedableSampler(sampler, seed)  # type: ignore[union-attr]
    elif sampler.generator is not None:
        return
    elif ranks == 1:
        loader.batch_sampler.sampler = RecordedSampler(sampler)  # type: ignore[union-attr]
    else:
        # Of its own, so that drawing an order leaves dropout's numbers alone.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def skip_first_batches(dataloader: PreparedLoader, num_batches: int | None = 0) -> PreparedLoader:
    """The pass that a prepared loader is in, without its first batches; see `Accelerator.skip_first_batches`."""
    if num_batches is None:
        num_batches, rest = divmod(dataloader.resume_at, dataloader.total_batch_size)
        if rest:
            raise TrainingError(
                f"the state had seen {dataloader.resume_at} samples of this pass, which is no whole number of "
                f"rounds of {dataloader.total_batch_size}: give num_batches"
            )
    return dataloader.without_first(num_batches)
