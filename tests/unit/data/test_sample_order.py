"""The sample order: a bijection that depends on (seed, epoch, position) and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data import SampleOrder, sample_seed
from plait.errors import DataError


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_every_sample_stands_at_exactly_one_position(length: int, seed: int, epoch: int) -> None:
    found = SampleOrder(length, seed).indices(epoch, 0, length)
    assert np.array_equal(np.sort(found), np.arange(length))


def test_every_small_length_is_a_bijection() -> None:
    for length in range(1, 200):
        assert set(SampleOrder(length, 1).indices(0, 0, length).tolist()) == set(range(length))


@given(data=st.data(), length=st.integers(1, 10**15))
def test_one_position_alone_gives_what_a_range_gives(data: st.DataObject, length: int) -> None:
    order = SampleOrder(length, data.draw(st.integers(0, 99)))
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 5)
    found = order.indices(3, start, stop).tolist()
    assert found == [order.index(3, position) for position in range(start, stop)]
    assert all(0 <= index < length for index in found)


def test_the_order_is_the_same_on_every_platform() -> None:
    assert SampleOrder(10, 0).indices(0, 0, 10).tolist() == [6, 1, 5, 2, 4, 8, 3, 7, 9, 0]
    assert SampleOrder(10, 0).indices(1, 0, 10).tolist() == [5, 4, 6, 8, 3, 2, 7, 9, 1, 0]
    assert SampleOrder(10, 1).indices(0, 0, 10).tolist() == [5, 2, 9, 4, 3, 0, 7, 8, 6, 1]
    assert SampleOrder(1000, 7).indices(3, 0, 4).tolist() == [251, 195, 154, 549]
    assert SampleOrder(10**12, 7).indices(3, 0, 2).tolist() == [580916242042, 575803659235]
    assert sample_seed(1, 2, 3) == 12128820869558221488


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [SampleOrder(1000, seed).indices(epoch, 0, 1000) for seed in range(5) for epoch in range(5)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            # Two independent permutations agree in one place on average.
            assert (one == other).sum() < 12


def test_without_shuffle_samples_come_in_their_own_order() -> None:
    assert SampleOrder(7, 3, shuffle=False).indices(2, 1, 6).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("length", [101, 4096, 50_000])
def test_the_order_is_well_mixed(length: int) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    seed = int(rng.integers(2**31))
    found = SampleOrder(length, seed).indices(0, 0, length).astype(float)
    sigma = 1 / np.sqrt(length)
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 6 * sigma
    assert abs(np.corrcoef(found, np.arange(length))[0, 1]) < 6 * sigma


def test_each_sample_is_as_likely_at_each_position() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), SampleOrder(6, 11).indices(epoch, 0, 6)] += 1
    expected = 3000 / 6
    # 25 degrees of freedom: a fair one exceeds 70 once in 10^5.
    assert ((counts - expected) ** 2 / expected).sum() < 70


def test_an_empty_data_set_and_a_position_outside_are_refused() -> None:
    with pytest.raises(DataError, match="0 samples"):
        SampleOrder(0, 0)
    with pytest.raises(IndexError):
        SampleOrder(5, 0).index(0, 5)


def test_the_seed_of_a_sample_depends_on_seed_epoch_and_index() -> None:
    seeds = {sample_seed(*key) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11)]}
    assert len(seeds) == 6
