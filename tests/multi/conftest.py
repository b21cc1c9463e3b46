from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.ranks import RankPool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
