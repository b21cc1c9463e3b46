"""`accelerate.data_loader`: the loader of one rank, its position, and gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from plait.data import sampler_num_samples
from plait.distributed import World
from plait.errors import ConfigError, DataError, Problem, TrainingError
from plait.frontends.accelerate.prepared import apply, has_only_tensors
from plait.frontends.accelerate.utils.operations import concatenate, find_batch_size

# The samples of each rank, in Accelerate's order.
#
# [Note: which rank reads which batch]
# The user's loader is written for one process. Without `split_batches`, each of n ranks reads whole batches: rank r
# reads batches r, r + n, r + 2n, … With it, each batch is split into n pieces. With `even_batches` the last round is
# filled with samples from the beginning, so that every rank has equally many batches of equal size.
#
# A *round* is what all ranks read at the same time: one batch each, or the pieces of one batch. A *pass* is one
# iteration over the loader, an epoch.


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Which batches, or pieces of batches, one rank reads; see [Note: which rank reads which batch]."""

    rank: int
    ranks: int
    split: bool = False
    even: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks


class ShareSampler(BatchSampler):
    """Yields the batches of indices that one rank reads."""

    def __init__(self, sampler: Any, share: BatchShare) -> None:
        # Without super().__init__: the given sampler may be any object with batches.
        self.batch_sampler = sampler
        self.share = share
        self.batch_size: Any = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)
        self.even_batches = share.even

    @property
    def sampler(self) -> Any:
        """The sampler of the user's loader."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        length, ranks = len(self.batch_sampler), self.share.ranks
        if self.share.split or length % ranks == 0:
            return length if self.share.split else length // ranks
        if self.drop_last:
            return length // ranks
        return length // ranks + (1 if self.even_batches or self.share.rank < length % ranks else 0)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pieces() if self.share.split else self._rounds()

    def _pieces(self) -> Iterator[list[Any]]:
        share, full = self.share, self.batch_size
        size = full // share.ranks
        mine = slice(size * share.rank, size * (share.rank + 1))
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == full:
                yield batch[mine]
            elif self.drop_last:
                return
            elif not self.even_batches:
                if len(batch) > mine.start:
                    yield batch[mine]
            else:
                yield _filled(batch, first, full)[mine]

    def _rounds(self) -> Iterator[list[Any]]:
        """Yield this rank's batch of each round; an incomplete last round is filled, used as it is, or dropped."""
        share, size = self.share, self.batch_size
        batches = iter(self.batch_sampler)
        first: list[list[Any]] = []
        while batch_round := list(islice(batches, share.ranks)):
            first = first or [list(batch) for batch in batch_round]
            full = len(batch_round) == share.ranks and (size is None or len(batch_round[-1]) == size)
            if not full:
                if self.drop_last:
                    return
                if self.even_batches:
                    batch_round = self._filled_round(batch_round, first)
            if share.rank < len(batch_round):
                yield batch_round[share.rank]

    def _filled_round(self, batch_round: list[list[Any]], first: list[list[Any]]) -> list[list[Any]]:
        ranks, size = self.share.ranks, self.batch_size
        if size is None:  # batches of any length: whole batches are repeated
            while len(first) < ranks:
                first = first + first
            return batch_round + first[: ranks - len(batch_round)]
        indices = _filled(list(chain(*batch_round)), list(chain(*first)), ranks * size)
        return [indices[start : start + size] for start in range(0, ranks * size, size)]


def _filled(batch: list[Any], first: list[Any], size: int) -> list[Any]:
    while len(batch) < size:
        batch = batch + first
    return batch[:size]


class ShareDataset(IterableDataset[Any]):
    """Yields one rank's samples of an iterable data set, which every rank reads completely."""

    def __init__(self, dataset: Any, share: BatchShare, batch_size: int, *, drop_last: bool) -> None:
        self.dataset = dataset
        self._share = share
        self._round = batch_size if share.split else batch_size * share.ranks
        self._drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to data sets that shuffle by it."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self._round)
        return (rounds + (1 if rest and not self._drop_last else 0)) * self._round // self._share.ranks

    def __iter__(self) -> Iterator[Any]:
        size = self._round // self._share.ranks
        samples = iter(self.dataset)
        first: list[Any] = []
        while group := list(islice(samples, self._round)):
            first = first or group
            if len(group) < self._round:
                if self._drop_last:
                    return
                group = _filled(group, first, self._round)
            yield from group[size * self._share.rank : size * (self._share.rank + 1)]


class SeedableSampler(RandomSampler):
    """Shuffles by seed and epoch alone, so that any epoch can be repeated."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        count = sampler_num_samples(sampler)
        super().__init__(sampler.data_source, replacement=sampler.replacement, num_samples=count)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class RecordedSampler(RandomSampler):
    """Shuffles as torch's RandomSampler does, and records the generator state, so that a pass can be repeated."""

    def __init__(self, sampler: RandomSampler) -> None:
        count = sampler_num_samples(sampler)
        super().__init__(sampler.data_source, replacement=sampler.replacement, num_samples=count)
        self.order: torch.Tensor | None = None
        """State of torch's generator at the beginning of the pass, from which its order was drawn."""
        self.repeat_from: torch.Tensor | None = None
        """The generator state to begin the next pass with; None unless it repeats the order of a saved pass."""

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        if self.repeat_from is None:
            self.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        else:
            self.generator.set_state(self.repeat_from)
            self.repeat_from = None
        self.order = self.generator.get_state()
        yield from super().__iter__()


class SkippingSampler(BatchSampler):
    """Yields batches of indices without the first ones."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.batch_sampler = sampler
        self.batch_size: Any = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)
        self._count = count

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self._count, 0)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self._count, None)


# Gradient accumulation: which micro-batch completes a step. The last one of a loader may do so early.


def step_count(steps: Any) -> int:
    """Return `steps`, the micro-batches per step; raise `ConfigError` if it is not a whole number from 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        message = f"{steps!r} is not a number of micro-batches"
        raise ConfigError(Problem("gradient_accumulation_steps", message, "Write a whole number, 1 or more."))
    return steps


@dataclass
class GradientState:
    """Gradient accumulation of one `Accelerator`, shared by everything that it prepares."""

    num_steps: int = 1
    """Micro-batches per step."""
    adjust_scheduler: bool = True
    """Whether micro-batches without an optimizer step count as scheduler steps, so that torch does not warn."""
    sync_with_dataloader: bool = True
    """Whether a loader's last batch completes a step, even if the step then has fewer micro-batches."""
    sync_each_batch: bool = False
    sync_gradients: bool = True
    """Whether the gradients of the current micro-batch complete a step."""
    loaders: list[PreparedLoader] = field(default_factory=list)
    """Loaders being read, the innermost last."""
    step: int = 0
    stepped: bool = True
    """Whether an optimizer has stepped since the last backward pass. If so, gradients that other optimizers still hold
    come from another optimizer's loss: a generator's loss, for example, also leaves gradients in the discriminator."""

    def advance(self) -> None:
        """Count a micro-batch."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The loader being read; None between passes."""
        return self.loaders[-1] if self.loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return bool(self.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        return self.loaders[-1].end_of_dataloader if self.loaders else False

    @property
    def remainder(self) -> int:
        """Samples in the last round of batches that are not repetitions; -1 if unknown."""
        return self.loaders[-1].remainder if self.loaders else -1

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The values of the `GradientAccumulationPlugin`, by argument."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}


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
    """How batches reach a rank."""

    share: BatchShare
    device: torch.device | None = None
    """Device that batches are moved to; None: they are not moved."""
    non_blocking: bool = False
    dispatch: bool = False
    """Whether rank 0 alone reads the data and sends it to all ranks."""
    skip: int = 0
    """Batches to skip at the beginning of a pass."""


class PreparedLoader(DataLoader[Any]):
    """Reads one rank's batches of the user's loader, and moves them to the device."""

    def __init__(self, loader: DataLoader[Any], delivery: Delivery, world: World, gradients: GradientState) -> None:
        self.loader = loader
        self.delivery = delivery
        self.end_of_dataloader = False
        self.remainder = -1
        """Samples in the last round of batches that are not repetitions; -1 if unknown."""
        self.iteration = 0
        """The number of passes that are complete."""
        self.position = 0
        """Rounds of batches of this pass that were yielded."""
        self.resume_at = 0
        """Samples that had been read of the pass in which the loaded state was saved."""
        self._order: Tensor | None = None
        """Generator state of the sampler at the beginning of this pass."""
        self._repeats_order = False
        """Whether the next pass repeats the order that `_order` gives."""
        self._origin: PreparedLoader | None = None
        """The loader that this one was made of, if it skips the first batches of its pass."""
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
            raise DataError("a DataLoader with batch_size=None cannot be shared between ranks; set batch_size")
        if not delivery.dispatch:
            batches = ShareSampler(batches, share) if share.ranks > 1 else batches
            batches = SkippingSampler(batches, delivery.skip) if delivery.skip else batches
            self._reads_to_skip = False
        super().__init__(dataset, batch_sampler=batches, **given)

    # ---- the pass over the data

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resumes = self._repeats_order
        self._begin()
        random_state = torch.get_rng_state()
        batches = self._dispatched() if self.delivery.dispatch else super().__iter__()
        if resumes:  # creating the iterator draws a seed for workers; the saved state already includes that draw
            torch.set_rng_state(random_state)
        current = next(batches, None)
        try:
            while current is not None:
                following = next(batches, None)  # read one batch ahead, to know whether the current one is the last
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
            sampler.repeat_from = self._order if self._repeats_order else None
        elif generator is not None:
            if self._repeats_order and self._order is not None:
                generator.set_state(self._order)
            elif self.delivery.share.ranks > 1:
                generator.set_state(self._world.broadcast(generator.get_state()))
            self._order = generator.get_state()
        self._repeats_order = False
        if self._origin is not None:
            self._origin._repeats_order = False
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
        """Yield this rank's piece of each round of batches, which rank 0 reads and broadcasts."""
        share = self.delivery.share
        source = super().__iter__() if self._world.is_main else None
        first: Any = None
        while True:
            group = None
            if source is not None:
                batches = list(islice(source, 1 if share.split else share.ranks))
                if not all(map(has_only_tensors, batches)):
                    raise DataError("dispatch_batches splits batches of tensors only; set it to false")
                group = concatenate(batches) if batches else None
            group = self._world.broadcast(group)
            if group is None:
                return
            first = group if first is None else first
            size = self.remainder = find_batch_size(group) or 0
            if missing := -size % share.ranks:
                if self.loader.drop_last:
                    return
                group = concatenate([group, _cut(first, 0, missing)])
            share_size = (find_batch_size(group) or 0) // share.ranks
            yield _cut(group, share_size * share.rank, share_size * (share.rank + 1))

    # ---- position

    @property
    def _generator(self) -> torch.Generator | None:
        """The generator of the user's sampler; None if it has none."""
        sampler = self.user_sampler
        if isinstance(sampler, (SeedableSampler, RecordedSampler)):
            return None
        generator = getattr(sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def user_sampler(self) -> Any:
        """The sampler of the user's loader."""
        return getattr(self.loader.batch_sampler, "sampler", None)

    @property
    def total_batch_size(self) -> int:
        """Samples per round of batches, over all ranks."""
        size = self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None)
        if size is None:
            raise TypeError("batches of any length")
        return int(size) if self.delivery.share.split else int(size) * self.delivery.share.ranks

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set."""
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
        """Set the epoch of the next pass, for samplers and data sets that shuffle by it."""
        self.iteration = epoch
        owners: tuple[Any, ...] = (self.loader.batch_sampler, self.user_sampler, self.dataset)
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def without_first(self, count: int) -> PreparedLoader:
        """Return a loader of the same pass without its first batches; only a stream (or dispatch) has to read them."""
        other = PreparedLoader(self.loader, replace(self.delivery, skip=count), self._world, self._gradients)
        other.iteration, other._origin = self.iteration, self
        other._order, other._repeats_order = self._order, self._repeats_order
        return other

    def state(self) -> tuple[dict[str, Any], Tensor | None]:
        """Return the position, also in samples for another number of ranks, and the sampler's generator state."""
        try:
            samples = self.position * self.total_batch_size
        except TypeError:
            samples = 0
        generator, sampler = self._generator, self.user_sampler
        if isinstance(sampler, RecordedSampler):
            order = sampler.order if self.position else None  # the next pass draws its order from torch's generator
        else:
            order = self._order if self.position or generator is None else generator.get_state()
        return {"iteration": self.iteration, "position": self.position, "samples": samples}, order

    def restore(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Restore what `state` returned: the next pass has the order of the saved one."""
        self.iteration, self.resume_at = int(state["iteration"]), int(state["samples"])
        self._order, self._repeats_order = order, order is not None


def _cut(batch: Any, start: int, end: int) -> Any:
    return apply(lambda tensor: tensor[start:end], batch)


def choose_delivery(
    loader: DataLoader[Any],
    share: BatchShare,
    *,
    device: torch.device | None,
    non_blocking: bool,
    dispatch: bool | None,
) -> Delivery:
    """Return how batches reach a rank. By default each rank reads its own; an iterable data set is read by rank 0."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if share.split and share.ranks > 1 and (size is None or size % share.ranks):
        problem = f"batches of {size} samples cannot be split between {share.ranks} ranks"
        raise ConfigError(Problem("split_batches", problem, "Make the batch size a multiple of the number of ranks."))
    if dispatch is None:
        dispatch = isinstance(loader.dataset, IterableDataset) and device is not None
    return Delivery(share, device, non_blocking, dispatch and share.ranks > 1)


def seed_sampler(loader: DataLoader[Any], *, ranks: int, seedable: bool, data_seed: int | None) -> None:
    """Replace the loader's random sampler, or give it a generator, so that all ranks shuffle in the same order."""
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
        # A separate generator, so that shuffling does not change the random numbers of dropout.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def skip_first_batches(dataloader: PreparedLoader, num_batches: int | None = 0) -> PreparedLoader:
    """Return a loader of the current pass without its first batches; see `Accelerator.skip_first_batches`."""
    if num_batches is None:
        num_batches, rest = divmod(dataloader.resume_at, dataloader.total_batch_size)
        if rest:
            raise TrainingError(
                f"the state had seen {dataloader.resume_at} samples of this pass, which is not a multiple of "
                f"{dataloader.total_batch_size}: pass num_batches"
            )
    return dataloader.without_first(num_batches)


DataLoaderShard = PreparedLoader
SeedableRandomSampler = SeedableSampler
