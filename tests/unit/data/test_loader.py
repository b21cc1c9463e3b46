"""The loader: rank-free order, exact coverage, resume, workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from plait.config.train import ResolvedBatch
from plait.data import MicroBatch, RankLoader
from plait.errors import DataError

sizes = st.integers(1, 5)


def loaders(
    dataset: Any, *, ranks: int = 1, micro: int = 2, accumulation: int = 1, seed: int = 5, **options: Any
) -> list[RankLoader]:
    """The loader of each rank."""
    batch = ResolvedBatch(ranks * accumulation * micro, micro, accumulation)
    options = {"shuffle": True, **options}
    return [RankLoader(dataset, rank=rank, ranks=ranks, batch=batch, seed=seed, **options) for rank in range(ranks)]


def real(step: list[MicroBatch]) -> list[int]:
    """The samples of a step that count."""
    return [int(i) for part in step if part.samples for i in part.inputs]


def as_lists(steps: Any) -> list[list[tuple[list[int], int]]]:
    return [[(part.inputs.tolist(), part.samples) for part in step] for step in steps]


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@given(n=st.integers(1, 80), ranks=sizes, micro=sizes, accumulation=sizes, epoch=st.integers(0, 3))
def test_an_epoch_visits_every_sample_once_over_all_ranks(
    n: int, ranks: int, micro: int, accumulation: int, epoch: int
) -> None:
    all_ranks = loaders(Numbers(n), ranks=ranks, micro=micro, accumulation=accumulation)
    per_rank = [list(loader.epoch(epoch)) for loader in all_ranks]

    assert sorted(i for steps in per_rank for step in steps for i in real(step)) == list(range(n))
    assert {len(steps) for steps in per_rank} == {all_ranks[0].steps_per_epoch}
    for together in zip(*per_rank, strict=True):
        assert len({len(step) for step in together}) == 1, "all ranks meet in the same collectives"
        for part in (part for step in together for part in step):
            assert len(part.inputs) == (part.samples or 1), "a filler carries one real sample"


@given(n=st.integers(1, 60), epoch=st.integers(0, 3))
def test_global_batches_do_not_depend_on_how_they_are_cut(n: int, epoch: int) -> None:
    def batches(ranks: int, micro: int, accumulation: int) -> list[list[int]]:
        group = loaders(Numbers(n), ranks=ranks, micro=micro, accumulation=accumulation)
        steps = zip(*(loader.epoch(epoch) for loader in group), strict=True)
        return [sorted(i for part in together for i in real(part)) for together in steps]

    one = batches(1, 12, 1)
    assert batches(2, 3, 2) == batches(4, 1, 3) == batches(3, 4, 1) == batches(1, 1, 12) == one
    (loader,) = loaders(Numbers(n), micro=12)
    assert [sorted(loader.sample_ids(epoch, step).tolist()) for step in range(len(one))] == one


def test_a_full_global_batch_is_the_micro_batches_in_order() -> None:
    group = loaders(Numbers(24), ranks=2, micro=3, accumulation=2)
    together = [next(loader.epoch(0)) for loader in group]
    in_order = [i for m in range(2) for rank in range(2) for i in together[rank][m].inputs.tolist()]
    assert in_order == group[0].sample_ids(0, 0).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_where_it_was_left(workers: int) -> None:
    _, loader = loaders(Numbers(53), ranks=2, micro=2, accumulation=2, workers=workers)
    assert loader.steps_per_epoch == 7
    whole = {epoch: as_lists(loader.epoch(epoch)) for epoch in (0, 1)}
    assert whole[0] != whole[1]
    for epoch, start in [(1, 3), (0, 6), (0, 0), (1, 7)]:
        assert as_lists(loader.epoch(epoch, start)) == whole[epoch][start:]
    (_, inline) = loaders(Numbers(53), ranks=2, micro=2, accumulation=2)
    assert as_lists(inline.epoch(1, 2)) == whole[1][2:]
    loader.close()


def test_resume_costs_nothing_however_far() -> None:
    class Counted(Numbers):
        read = 0

        def __getitem__(self, index: int) -> Tensor:
            self.read += 1
            return torch.tensor(index)

    dataset = Counted(10**9)
    (loader,) = loaders(dataset, micro=4)
    next(loader.epoch(17, 200_000_000))
    assert dataset.read == 4


def test_drop_last_leaves_the_short_batch_out() -> None:
    (loader,) = loaders(Numbers(11), micro=4, drop_last=True)
    assert (loader.steps_per_epoch, loader.samples_per_epoch) == (2, 8)
    assert [part.samples for step in loader.epoch(0) for part in step] == [4, 4]
    (whole,) = loaders(Numbers(11), micro=4)
    assert (whole.steps_per_epoch, whole.samples_per_epoch) == (3, 11)


def test_a_data_set_that_reads_many_at_once_is_asked_for_many() -> None:
    class Many(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            raise AssertionError("one by one")

        def __getitems__(self, ids: list[int]) -> list[Tensor]:
            return [torch.tensor(index) for index in ids]

    (loader,) = loaders(Many(10), micro=5)
    assert sorted(i for step in loader.epoch(0) for i in real(step)) == list(range(10))


def test_ready_made_batches_pass_through_a_collate_of_the_users_own() -> None:
    batches = [{"x": torch.full((3,), i)} for i in range(4)]
    (loader,) = loaders(batches, micro=1, shuffle=False, collate=lambda items: items[0])
    assert [step[0].inputs is batches[i] for i, step in enumerate(loader.epoch(0))] == [True] * 4


def test_mappings_tuples_and_numbers_are_stacked_as_torch_does() -> None:
    (mapping,) = loaders([{"a": torch.ones(2), "b": torch.zeros(())}] * 4, micro=4)
    inputs = next(mapping.epoch(0))[0].inputs
    assert {key: tuple(value.shape) for key, value in inputs.items()} == {"a": (4, 2), "b": (4,)}
    (pairs,) = loaders(TensorDataset(torch.randn(4, 3), torch.arange(4)), micro=4)
    x, y = next(pairs.epoch(0))[0].inputs
    assert (x.shape, y.shape) == ((4, 3), (4,))
    (numbers,) = loaders([1, 2, 3, 4], micro=2, shuffle=False)
    assert next(numbers.epoch(0))[0].inputs.tolist() == [1, 2]


class Told(Numbers):
    """Samples that depend on the epoch the data set was told of."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(1000 * self.epoch + index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch_wherever_it_is_read(workers: int) -> None:
    (loader,) = loaders(Told(9), micro=2, workers=workers)
    for epoch in (3, 4):
        found = sorted(i for step in loader.epoch(epoch) for i in real(step))
        assert found == [1000 * epoch + i for i in range(9)]
    loader.close()


class Noisy(Numbers):
    """Samples that draw from every global generator."""

    def __getitem__(self, index: int) -> Tensor:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


def test_random_samples_of_workers_depend_on_seed_epoch_and_sample_alone() -> None:
    def samples(workers: int, micro: int, epoch: int, seed: int = 5) -> dict[int, list[float]]:
        (loader,) = loaders(Noisy(8), micro=micro, workers=workers, seed=seed)
        rows = [row for step in loader.epoch(epoch) for part in step for row in part.inputs.tolist()]
        loader.close()
        return {int(index): noise for index, *noise in rows}

    first = samples(1, 4, 0)
    assert samples(2, 2, 0) == first
    other = samples(1, 4, 1)
    assert all(other[index] != first[index] for index in first)


def test_an_epoch_left_for_another_one_says_so_with_workers() -> None:
    (loader,) = loaders(Numbers(20), micro=2, workers=1)
    abandoned = loader.epoch(0)
    next(abandoned)
    assert len(list(loader.epoch(1))) == 10
    with refused(DataError, "epoch 0", "workers"):
        next(abandoned)
    loader.close()


def test_user_mistakes_are_named() -> None:
    with refused(DataError, "list", "empty"):
        loaders([])
    with refused(DataError, "int", "__getitem__", "__iter__"):
        loaders(3)
    with refused(DataError, "drop_last", "5 samples", "batch.total", "8"):
        loaders(Numbers(5), micro=8, drop_last=True)
    with refused(DataError, "step 4", "3 steps"):
        loaders(Numbers(5))[0].epoch(0, 4)
    with refused(DataError, "step 3", "3 steps"):
        loaders(Numbers(5))[0].sample_ids(0, 3)
    with refused(DataError, "batch.total 7", "2 ranks"):
        RankLoader(Numbers(5), rank=0, ranks=2, batch=ResolvedBatch(7, 1, 1), seed=0, shuffle=False)
    with refused(DataError, "2 samples", "Tensor", "collate"):
        next(loaders([torch.zeros(2), torch.zeros(3)])[0].epoch(0))
    with refused(DataError, "2 samples", "dict", "collate"):
        next(loaders([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}])[0].epoch(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator to pin memory for")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_micro_batches_lie_in_page_locked_memory(workers: int) -> None:
    (loader,) = loaders(Numbers(9), pin_memory=True, workers=workers)
    steps = list(loader.epoch(0))
    assert all(part.inputs.is_pinned() for step in steps for part in step)
    assert sorted(i for step in steps for i in real(step)) == list(range(9))
    loader.close()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_pinning_without_an_accelerator_is_refused() -> None:
    with pytest.raises(DataError, match="pin_memory"):
        loaders(Numbers(5), pin_memory=True)
