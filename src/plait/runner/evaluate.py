"""One pass over data without training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from plait.errors import DataError
from plait.runner.metrics import Metric
from plait.spec import MicroBatch
from plait.strategy import Engine


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
    totals = [0.0, 0.0]
    records: list[list[object]] = [[] for _ in metrics]
    batches = 0
    for micro_batches in islice(steps, limit):
        batches += 1
        for batch in micro_batches:
            found = engine.evaluate(batch)
            totals[0] += found.loss_sum
            totals[1] += found.loss_count
            if batch.samples and found.outputs is not None:
                for metric, mine in zip(metrics, records, strict=True):
                    mine.extend(metric.measure(found.outputs, batch.inputs))
    if batches == 0:
        raise DataError(f"{role} ended before the first batch: there is nothing to measure on")
    world = engine.world
    if world.everyone is not None:
        box = torch.tensor(totals, dtype=torch.float64, device=world.device)
        dist.all_reduce(box, group=world.everyone)
        totals = box.tolist()
    if totals[1] == 0:
        raise DataError(f"{role} has no targets in {batches} batches: is every text empty, or every label -100?")
    results = {"loss": totals[0] / totals[1]}
    for metric, mine in zip(metrics, records, strict=True):
        everybody = [record for part in world.gather(mine) for record in part]
        results.update(metric.summarize(everybody))
    return results, batches
