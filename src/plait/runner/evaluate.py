"""Validation and test: a pass over a loader's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from plait.runner.metrics import Metric
from plait.spec import MicroBatch
from plait.strategy import Engine
from plait.strategy import evaluate as evaluate_batches


def evaluate(
    engine: Engine,
    steps: Iterable[Sequence[MicroBatch]],
    metrics: Sequence[Metric],
    *,
    role: str,
    limit: int | None = None,
) -> tuple[dict[str, float], int]:
    """The mean loss and all metrics over the data, each sample counted once; and how many batches it took.

    Ranks without a sample of their own in the last batch run a filler, so that sharded models stay in step;
    it adds nothing to any number.
    """
    batches = 0

    def micro_batches() -> Iterator[MicroBatch]:
        nonlocal batches
        for batches, step in enumerate(islice(steps, limit), 1):  # noqa: B007
            yield from step

    # A loader gives each rank equally many, fillers included.
    results = evaluate_batches(engine, micro_batches(), metrics, role=role, even=True)
    return results, batches
