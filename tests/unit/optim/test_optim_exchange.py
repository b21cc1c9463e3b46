"""Who works on which whole matrix."""

from __future__ import annotations

import random

from plait.optim.full_params import assign_owners


def test_the_largest_go_first_to_the_least_loaded() -> None:
    assert assign_owners([1.0, 8.0, 4.0, 4.0, 1.0], 2) == [0, 0, 1, 1, 1]


def test_fewer_jobs_than_ranks_leave_ranks_idle() -> None:
    assert assign_owners([3.0, 2.0], 4) == [0, 1]
    assert assign_owners([], 4) == []


def test_no_rank_is_ahead_by_more_than_one_job() -> None:
    costs = [random.uniform(1, 10) for _ in range(50)]
    loads = [0.0] * 7
    for cost, owner in zip(costs, assign_owners(costs, 7), strict=True):
        loads[owner] += cost
    assert max(loads) - min(loads) <= max(costs)
