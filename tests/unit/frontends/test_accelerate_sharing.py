"""Whose batch is whose: the same as Accelerate's own samplers give, for any sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from plait.frontends.accelerate.data_loader import (
    BatchShare,
    RecordedSampler,
    ShareDataset,
    ShareSampler,
    SkippingSampler,
)

theirs = pytest.importorskip("accelerate.data_loader")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_shared_as_there(split: bool, even: bool, drop_last: bool) -> None:
    for ranks in (2, 3):
        for size in (6, 12) if split else (1, 4, 5):
            for count in (1, 4, 5, 11, 12, 24, 25, 29):
                for rank in range(ranks):
                    whole = BatchSampler(range(count), size, drop_last)
                    expected = theirs.BatchSamplerShard(whole, ranks, rank, split, even)
                    found = ShareSampler(whole, BatchShare(rank, ranks, split, even))
                    assert [list(batch) for batch in found] == [list(batch) for batch in expected]
                    assert len(found) == len(expected)


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_are_shared_as_there(split: bool, drop_last: bool) -> None:
    for count in (1, 3, 8, 13, 24):
        for rank in range(2):
            expected = theirs.IterableDatasetShard(Stream(count), 4, drop_last, 2, rank, split)
            found = ShareDataset(Stream(count), BatchShare(rank, 2, split), 4, drop_last=drop_last)
            assert list(found) == list(expected)
            if not split:  # there, lengths are those without splitting
                assert len(found) == len(expected)


def test_batches_of_any_length_are_repeated_whole() -> None:
    batches: Any = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    for rank in range(2):
        expected = theirs.BatchSamplerShard(batches, 2, rank)
        assert list(ShareSampler(batches, BatchShare(rank, 2))) == list(expected)


def test_a_pass_can_be_had_again_in_the_order_of_torch() -> None:
    data = list(range(20))
    torch.manual_seed(3)
    plain = [batch.tolist() for batch in DataLoader(data, batch_size=4, sampler=RandomSampler(data))]
    torch.manual_seed(3)
    sampler = RecordedSampler(RandomSampler(data))
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    assert [batch.tolist() for batch in loader] == plain
    order = sampler.order
    assert [batch.tolist() for batch in loader] != plain
    sampler.repeat_from = order
    assert [batch.tolist() for batch in loader] == plain


def test_skipped_batches_are_not_drawn_into_the_pass() -> None:
    whole = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    assert list(SkippingSampler(whole, 2)) == [[6, 7, 8], [9]]
    assert len(SkippingSampler(whole, 2)) == 2
