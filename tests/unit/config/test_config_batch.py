"""The batch sum: any two sizes give the third, and a sum that cannot be is shown."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from plait.config import ResolvedBatch, resolve_batch
from plait.config.train import BatchConfig
from plait.errors import ConfigError

sizes = st.integers(1, 64)
maybe = st.none() | st.integers(1, 200)


def failure(ranks, **sizes):
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(**sizes), ranks)
    return caught.value.problems[0]


@given(micro=sizes, accumulation=sizes, ranks=sizes, left_out=st.sampled_from(["total", "micro", "accumulation", None]))
def test_any_two_give_the_third_and_all_three_agree(micro, accumulation, ranks, left_out):
    whole = {"total": micro * accumulation * ranks, "micro": micro, "accumulation": accumulation}
    known = {name: size for name, size in whole.items() if name != left_out}
    assert resolve_batch(BatchConfig(**known), ranks) == ResolvedBatch(**whole)


@given(total=maybe, micro=maybe, accumulation=maybe, ranks=sizes)
def test_whatever_comes_out_adds_up_and_keeps_what_was_given(total, micro, accumulation, ranks):
    try:
        batch = resolve_batch(BatchConfig(total=total, micro=micro, accumulation=accumulation), ranks)
    except ConfigError:
        assert total is not None
        return
    assert batch.total == batch.micro * batch.accumulation * ranks
    for given_size, size in ((total, batch.total), (micro, batch.micro), (accumulation, batch.accumulation)):
        assert given_size in (None, size)


@given(total=maybe, micro=maybe, accumulation=maybe, ranks=sizes)
def test_every_suggestion_works(total, micro, accumulation, ranks):
    sizes = {"total": total, "micro": micro, "accumulation": accumulation}
    try:
        resolve_batch(BatchConfig(**sizes), ranks)
    except ConfigError as error:
        suggestions = re.findall(r"`(\w+): (\d+)`", error.problems[0].remedy)
        assert suggestions
        for name, size in suggestions:
            resolve_batch(BatchConfig(**{**sizes, name: int(size)}), ranks)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (4, 1, 1)),
        ({"total": 32}, (32, 8, 1)),
        ({"micro": 3}, (12, 3, 1)),
        ({"accumulation": 5}, (20, 1, 5)),
    ],
)
def test_sizes_left_out_are_one_where_they_are_free(sizes, expected):
    assert resolve_batch(BatchConfig(**sizes), 4) == ResolvedBatch(*expected)


def test_a_contradiction_shows_the_whole_sum():
    problem = failure(2, total=32, micro=4, accumulation=3)
    assert problem.path == "batch"
    assert "32 ≠ 4 × 3 × 2 = 24" in problem.message
    assert "`total: 24` or `accumulation: 4`" in problem.remedy


def test_an_uneven_batch_shows_the_division_and_the_nearest_sizes():
    problem = failure(2, total=32, micro=5)
    assert "32 ÷ (5 × 2) = 3.2" in problem.message
    for way in ("`total: 30`", "`total: 40`", "`micro: 4`", "`micro: 8`"):
        assert way in problem.remedy


def test_a_total_smaller_than_the_ranks_is_uneven():
    problem = failure(8, total=3)
    assert "3 ÷ 8 = 0.375" in problem.message
    assert problem.remedy == "Write `total: 8`."


@given(sizes, sizes, sizes, sizes)
def test_split_micro_batches_are_small_enough_and_the_batch_is_kept(micro, accumulation, ranks, parts):
    batch = ResolvedBatch(micro * accumulation * ranks, micro, accumulation)
    if parts > micro:
        with refused(ConfigError, max(2 * micro // parts, 1), "`strategy.recompute: full`", key="batch.micro"):
            batch.split(parts)
        return
    found = batch.split(parts)
    assert found.micro <= micro / parts
    assert found.micro * found.accumulation * ranks == found.total == batch.total
