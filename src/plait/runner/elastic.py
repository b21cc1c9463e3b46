"""With how many ranks a run can go on when some are gone or new ones have come."""

from __future__ import annotations

from typing import Any

from plait.config import ResolvedBatch, RunConfig, resolve_layout
from plait.errors import PlaitError
from plait.runner.sources import batch_of
from plait.world import Ranks


def possible_sizes(config: RunConfig, ranks: Ranks, data: Any, batch: ResolvedBatch) -> list[int]:
    """The numbers of ranks under which the layout can be made and the global batch stays as it is.

    Tried out with the same functions that decide at the start. Empty where the launcher starts nobody anew.
    """
    sizes = range(1, ranks.most + 1)
    return [size for size in sizes if _total(config, size, min(ranks.local_size, size), data) == batch.total]


def _total(config: RunConfig, size: int, local_size: int, data: Any) -> int | None:
    """The global batch with so many ranks; None where there can be no such run."""
    try:
        layout = resolve_layout(config.strategy, size=size, local_size=local_size)
        batch = batch_of(config, layout.data_parallel, data)
        if layout.pp > 1:
            from plait.parallel import check_pipeline

            check_pipeline(config.strategy.pipeline, layout.pp, batch.accumulation)
    except PlaitError:
        return None
    return batch.total
