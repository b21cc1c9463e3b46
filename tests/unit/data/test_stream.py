"""Streams: read in order, dealt out to ranks, ended together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused
from torch.utils.data import IterableDataset

from plait.config.train import ResolvedBatch
from plait.data import RankLoader, is_stream
from plait.errors import DataError

sizes = st.integers(1, 4)


class Count(IterableDataset[int]):
    """The numbers up to ``stop``, moved by the epoch."""

    def __init__(self, stop: int) -> None:
        self._stop = stop
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self._epoch, 100 * self._epoch + self._stop))


def loaders(stream: Any, *, ranks: int = 1, micro: int = 2, accumulation: int = 1, **options: Any) -> list[RankLoader]:
    batch = ResolvedBatch(ranks * accumulation * micro, micro, accumulation)
    options = {"shuffle": False, **options}
    return [RankLoader(stream, rank=rank, ranks=ranks, batch=batch, seed=0, **options) for rank in range(ranks)]


def as_lists(steps: Any) -> list[list[tuple[list[int], int]]]:
    return [[(part.inputs.tolist(), part.samples) for part in step] for step in steps]


@given(n=st.integers(0, 60), ranks=sizes, micro=sizes, accumulation=sizes, drop_last=st.booleans())
def test_ranks_share_a_stream_and_end_together(
    n: int, ranks: int, micro: int, accumulation: int, drop_last: bool
) -> None:
    group = loaders(Count(n), ranks=ranks, micro=micro, accumulation=accumulation, drop_last=drop_last)
    per_rank = [as_lists(loader.epoch(0)) for loader in group]
    total = ranks * micro * accumulation
    batches = []
    for together in zip(*per_rank, strict=True):
        assert len({len(step) for step in together}) == 1
        loads = [sum(samples for _, samples in step) for step in together]
        assert max(loads) - min(loads) <= 1
        assert all(len(ids) == (samples or 1) <= micro for step in together for ids, samples in step)
        batches.append(sorted(i for step in together for ids, samples in step if samples for i in ids))
    end = n // total * total if drop_last else n
    assert batches == [list(range(a, min(a + total, end))) for a in range(0, end, total)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_stream_skips_what_was_seen(workers: int) -> None:
    (loader,) = loaders(Count(11), micro=2, workers=workers)
    whole = as_lists(loader.epoch(1))
    assert whole[0] == [([100, 101], 2)]
    assert as_lists(loader.epoch(1, 4)) == whole[4:]
    assert as_lists(loader.epoch(1, 6)) == []


def test_a_stream_has_no_length_and_no_ids() -> None:
    (loader,) = loaders(Count(5))
    assert loader.steps_per_epoch is None
    assert loader.samples_per_epoch is None
    with refused(DataError, "Count", "stream", "ids"):
        loader.sample_ids(0, 0)


def test_an_iterator_can_be_read_once_only() -> None:
    (loader,) = loaders(iter([torch.ones(1)] * 3))
    assert [part.samples for step in loader.epoch(0) for part in step] == [2, 1]
    with refused(DataError, "list_iterator", "__iter__"):
        next(loader.epoch(1))


def test_what_a_stream_cannot_do_is_refused() -> None:
    with refused(DataError, "shuffle", "Count", "false"):
        loaders(Count(5), shuffle=True)
    with refused(DataError, "workers", "3", "Count"):
        loaders(Count(5), workers=3)


def test_a_stream_is_told_from_a_data_set() -> None:
    assert is_stream(Count(3))
    assert is_stream(i for i in range(3))
    assert not is_stream([1, 2])
