"""Taking over a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from plait.config.train import ResolvedBatch
from plait.data import RankLoader, unwrap_dataloader
from plait.errors import DataError

data = TensorDataset(torch.arange(12))


def test_the_samplers_type_decides_about_shuffling() -> None:
    assert unwrap_dataloader(DataLoader(data, shuffle=True)).shuffle
    assert not unwrap_dataloader(DataLoader(data)).shuffle
    assert unwrap_dataloader(DataLoader(data, sampler=DistributedSampler(data, 4, 1))).shuffle
    assert not unwrap_dataloader(DataLoader(data, sampler=DistributedSampler(data, 4, 1, shuffle=False))).shuffle


def test_sizes_and_workers_are_taken_over() -> None:
    parts = unwrap_dataloader(DataLoader(data, batch_size=3, drop_last=True, num_workers=2, prefetch_factor=5))
    assert (parts.micro, parts.drop_last, parts.workers) == (3, True, 2)
    assert parts.worker_options["prefetch_factor"] == 5


def test_a_batch_sampler_of_torchs_own_is_read() -> None:
    sampler = BatchSampler(SequentialSampler(data), batch_size=4, drop_last=True)
    parts = unwrap_dataloader(DataLoader(data, batch_sampler=sampler))
    assert (parts.micro, parts.drop_last, parts.shuffle) == (4, True, False)


def test_a_subset_sampler_narrows_the_data_set() -> None:
    parts = unwrap_dataloader(DataLoader(data, sampler=SubsetRandomSampler([1, 5, 7])))
    assert parts.shuffle
    assert sorted(int(parts.dataset[i][0]) for i in range(3)) == [1, 5, 7]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(data, sampler=WeightedRandomSampler([1.0] * 12, 12)), "WeightedRandomSampler"),
        (DataLoader(data, sampler=RandomSampler(data, replacement=True)), "replacement"),
        (DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), "batch_sampler"),  # type: ignore[arg-type]
    ],
)
def test_an_order_that_belongs_to_one_process_is_refused(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        unwrap_dataloader(loader)


def test_a_dataloader_without_shuffling_gives_the_same_batches_as_torch() -> None:
    ours = DataLoader(data, batch_size=5)
    loader = RankLoader.from_dataloader(ours, rank=0, ranks=1, batch=ResolvedBatch(5, 5, 1), seed=0)
    for step, theirs in zip(loader.epoch(0), ours, strict=True):
        assert torch.equal(step[0].inputs[0], theirs[0])


def test_ready_made_batches_pass_through_unchanged() -> None:
    batches = [torch.full((4,), i) for i in range(3)]
    for options in ({"batch_size": None}, {"batch_size": 1, "collate_fn": lambda items: items[0]}):
        source = DataLoader(batches, **options)  # type: ignore[arg-type, call-overload]
        loader = RankLoader.from_dataloader(source, rank=0, ranks=1, batch=ResolvedBatch(1, 1, 1), seed=0)
        assert [step[0].inputs.tolist() for step in loader.epoch(0)] == [[i] * 4 for i in range(3)]


def test_an_iterable_dataset_stays_a_stream() -> None:
    class Three(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    source = DataLoader(Three(), batch_size=2)
    loader = RankLoader.from_dataloader(source, rank=0, ranks=1, batch=ResolvedBatch(2, 2, 1), seed=0)
    assert [step[0].inputs.tolist() for step in loader.epoch(0)] == [[0, 1], [2]]


def test_two_sizes_that_disagree_are_both_named() -> None:
    with refused(DataError, "batch.micro", "2", "batch_size", "5"):
        RankLoader.from_dataloader(
            DataLoader(data, batch_size=5), rank=0, ranks=1, batch=ResolvedBatch(2, 2, 1), seed=0
        )
    with refused(DataError, "Loader.from_dataloader"):
        RankLoader(DataLoader(data), rank=0, ranks=1, batch=ResolvedBatch(2, 2, 1), seed=0, shuffle=False)


def test_micro_batches_that_are_split_have_the_samples_of_whole_ones() -> None:
    loader = DataLoader(data, batch_size=4, shuffle=True)
    whole = RankLoader.from_dataloader(loader, rank=0, ranks=1, batch=ResolvedBatch(4, 4, 1), seed=5)
    split = RankLoader.from_dataloader(loader, rank=0, ranks=1, batch=ResolvedBatch(4, 1, 4), seed=5, split=True)
    for one, four in zip(whole.epoch(0), split.epoch(0), strict=True):
        assert len(four) == 4
        assert torch.equal(one[0].inputs[0], torch.cat([micro.inputs[0] for micro in four]))
