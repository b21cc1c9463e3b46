"""With how many ranks a run can go on."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from plait.config import parse_sections, resolve_layout
from plait.distributed import Ranks
from plait.trainer.runner import possible_sizes
from plait.trainer.sources import batch_of


@pytest.mark.parametrize(
    ("sections", "size", "expected"),
    [
        ({"batch": {"total": 12}}, 4, [1, 2, 3, 4, 6]),
        ({"batch": {"total": 12, "micro": 2}}, 2, [1, 2, 3, 6]),
        ({"batch": {"micro": 2}}, 4, [4]),  # the batch is left to the number of ranks, so that must stay
        ({"batch": {"total": 8}, "strategy": {"zero": 3, "layout": {"tp": 2}}}, 4, [2, 4, 8]),
        ({"batch": {"total": 8}, "strategy": {"zero": 3, "layout": {"dp_shard": 2, "dp_replicate": 2}}}, 4, [4]),
    ],
)
def test_the_layout_and_the_batch_say_so(sections: dict[str, Any], size: int, expected: list[int]) -> None:
    config = parse_sections(**sections).config
    layout = resolve_layout(config.strategy, size=size, local_size=size)
    batch = batch_of(config, layout.data_parallel, None)
    assert possible_sizes(config, Ranks(0, size, 0, size, "torchrun", most=8), None, batch) == expected


def test_nobody_asks_where_the_launcher_starts_nobody_anew() -> None:
    config = parse_sections(batch={"total": 8}).config
    assert possible_sizes(config, Ranks(0, 2, 0, 2, "torchrun"), None, batch_of(config, 2, None)) == []


def test_the_batch_of_a_data_loader_counts() -> None:
    config = parse_sections(batch={"total": 8}).config
    data = DataLoader([1] * 32, batch_size=4)
    batch = batch_of(config, 2, data)
    assert possible_sizes(config, Ranks(0, 2, 0, 2, "torchrun", most=8), data, batch) == [1, 2]
