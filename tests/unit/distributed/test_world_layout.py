"""How many ranks each axis gets."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import Layout, parse_sections, resolve_layout
from plait.errors import ConfigError


def layout(strategy: Any, size: int, local_size: int | None = None) -> Layout:
    config = parse_sections(strategy=strategy).config
    return resolve_layout(config.strategy, size=size, local_size=local_size or size)


@pytest.mark.parametrize(
    ("strategy", "size", "local_size", "replicate", "shard"),
    [
        ("single", 1, 1, 1, 1),
        ({}, 1, 1, 1, 1),
        ({}, 4, 4, 4, 1),
        ("ddp", 8, 2, 8, 1),
        ({"zero": 0, "layout": {"dp_replicate": 4}}, 4, 4, 4, 1),
        ("zero1", 4, 4, 1, 4),
        ("zero2", 4, 2, 1, 4),
        ("zero3", 1, 1, 1, 1),
        ("fsdp", 6, 6, 1, 6),
        ({"zero": 3, "layout": {"dp_shard": 2}}, 8, 8, 4, 2),
        ({"zero": 3, "layout": {"dp_replicate": 2}}, 8, 8, 2, 4),
        ({"zero": 1, "layout": {"dp_replicate": 2, "dp_shard": 4}}, 8, 8, 2, 4),
        # FSDP's hybrid sharding: shards within a host, replicas between hosts.
        ("hsdp", 8, 4, 2, 4),
        ("hsdp", 4, 4, 1, 4),
        ("hsdp", 1, 1, 1, 1),
        ({"sharding": "_HYBRID_SHARD_ZERO2"}, 6, 2, 3, 2),
        ({"sharding": "HYBRID_SHARD", "layout": {"dp_shard": 2}}, 8, 4, 4, 2),
    ],
)
def test_absent_axes_take_the_ranks_that_are_left(
    strategy: Any, size: int, local_size: int, replicate: int, shard: int
) -> None:
    found = layout(strategy, size, local_size)
    assert (found.dp_replicate, found.dp_shard) == (replicate, shard)
    assert found.data_parallel == size


@pytest.mark.parametrize(
    ("strategy", "size", "local_size"),
    [
        ("single", 2, 2),
        ({"zero": 3, "layout": {"dp_shard": 3}}, 4, 4),
        ({"zero": 3, "layout": {"dp_shard": 8}}, 4, 4),
        ({"zero": 3, "layout": {"dp_replicate": 3}}, 4, 4),
        ({"zero": 3, "layout": {"dp_replicate": 2, "dp_shard": 4}}, 4, 4),
        ({"layout": {"dp_replicate": 2}}, 4, 4),
        ("hsdp", 6, 4),
    ],
)
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(strategy: Any, size: int, local_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(strategy, size, local_size)
    (problem,) = caught.value.problems
    assert problem.path == "strategy.layout"
    assert f"{size} ranks" in problem.message
    assert "process" in problem.remedy
