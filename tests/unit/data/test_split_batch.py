"""How a global batch is cut over ranks and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from plait.data import split_batch
from plait.errors import DataError

sizes = st.integers(1, 6)


@given(ranks=sizes, accumulation=sizes, micro=sizes)
def test_a_full_batch_is_runs_of_micro_batches_over_all_ranks(ranks: int, accumulation: int, micro: int) -> None:
    table = split_batch(ranks * accumulation * micro, ranks=ranks, accumulation=accumulation, micro=micro)
    in_order = [table[rank][m] for m in range(accumulation) for rank in range(ranks)]
    assert in_order == [(i * micro, (i + 1) * micro) for i in range(ranks * accumulation)]


@given(data=st.data(), ranks=sizes, accumulation=sizes, micro=sizes)
def test_any_batch_gives_each_sample_to_one_place_and_each_rank_as_many_micro_batches(
    data: st.DataObject, ranks: int, accumulation: int, micro: int
) -> None:
    n = data.draw(st.integers(1, ranks * accumulation * micro))
    table = split_batch(n, ranks=ranks, accumulation=accumulation, micro=micro)

    assert len(table) == ranks
    assert sorted(j for row in table for a, b in row for j in range(a, b)) == list(range(n))
    loads = [sum(b - a for a, b in row) for row in table]
    assert max(loads) - min(loads) <= 1
    counts = {len(row) for row in table}
    assert counts == {max(1, -(-max(loads) // micro))}
    assert counts.pop() <= accumulation
    assert all(b - a <= micro for row in table for a, b in row)


def test_ranks_without_a_sample_get_an_empty_micro_batch() -> None:
    assert split_batch(2, ranks=4, accumulation=2, micro=3) == (((0, 1),), ((1, 2),), ((2, 2),), ((2, 2),))


@pytest.mark.parametrize("n", [0, 13])
def test_a_batch_that_is_empty_or_too_large_is_refused(n: int) -> None:
    with refused(DataError, n, "2 ranks", "12"):
        split_batch(n, ranks=2, accumulation=3, micro=2)
