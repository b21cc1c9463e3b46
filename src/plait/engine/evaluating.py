"""Evaluation: compute loss and metrics over data without training, on all ranks together.

[Note: a rank without a batch]
If parameters, sequences or layers are sharded, a forward pass contains collectives: every rank must run the same number
of forward passes. So before each micro-batch an all-reduce tells whether any rank has one left; a rank that has none
runs its first micro-batch again as a filler, with weight zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from plait.data import MicroBatch
from plait.errors import DataError

if TYPE_CHECKING:
    from plait.engine.base import Engine


class Measures(Protocol):
    """The interface of a metric, as `evaluate` uses it (`plait.trainer.Metric`)."""

    def measure(self, outputs: Any, inputs: Any) -> Sequence[Any]:
        """Return one record per sample of a micro-batch."""

    def summarize(self, records: Sequence[Any]) -> Mapping[str, float]:
        """Return the metric's values, by name, from the records of all ranks."""


def evaluate(
    engine: Engine,
    batches: Iterable[Any],
    metrics: Sequence[Measures] = (),
    *,
    role: str = "batches",
    even: bool = False,
) -> dict[str, float]:
    """Return the mean loss over all targets of all ranks' micro-batches, and the metrics over all samples.

    `role` is the name of the data in messages. `even`: all ranks have the same number of micro-batches, so the
    all-reduce before each is left out. Raises `DataError` if there are no batches or no targets. Every rank must call
    it.
    """
    world = engine.world
    totals = [0.0, 0.0]
    records: list[list[Any]] = [[] for _ in metrics]
    count = 0
    for batch in batches if even or world.everyone is None else _synchronized(engine, batches, role):
        count += 1
        evaluation = engine.evaluate_micro_batch(batch)
        totals[0] += evaluation.loss_sum
        totals[1] += evaluation.loss_count
        inputs, samples = (batch.inputs, batch.samples) if isinstance(batch, MicroBatch) else (batch, 1)
        if samples and evaluation.outputs is not None:
            for metric, mine in zip(metrics, records, strict=True):
                mine.extend(metric.measure(evaluation.outputs, inputs))
    if count == 0:
        raise DataError(f"{role} ended before the first batch: there is nothing to evaluate on")
    if world.everyone is not None:
        box = torch.tensor(totals, dtype=torch.float64, device=world.device)
        dist.all_reduce(box, group=world.everyone)
        totals = box.tolist()
    if totals[1] == 0:
        raise DataError(f"{role} has no targets in {count} micro-batches: is every text empty, or every label -100?")
    results = {"loss": totals[0] / totals[1]}
    for metric, mine in zip(metrics, records, strict=True):
        everybody = [record for rank_records in world.gather(mine) for record in rank_records]
        results.update(metric.summarize(everybody))
    return results


def _synchronized(engine: Engine, batches: Iterable[Any], role: str) -> Iterator[Any]:
    """Yield this rank's micro-batches, then fillers until no rank has any left; see [Note: a rank without a batch]."""
    world = engine.world
    mine = iter(batches)
    first: Any = None
    while True:
        batch = next(mine, None)
        first = batch if first is None else first
        box = torch.tensor([batch is not None, first is None], dtype=torch.int32, device=world.device)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=world.everyone)
        some_left, some_have_none = box.tolist()
        if not some_left:
            return
        if some_have_none:
            empty = [rank for rank, began in enumerate(world.gather(first is not None)) if not began]
            raise DataError(
                f"{role} ended before the first batch on rank {empty[0]}, while other ranks have batches: give every "
                "rank at least one micro-batch"
            )
        yield batch if batch is not None else _filler(first)


def _filler(batch: Any) -> MicroBatch:
    return MicroBatch(batch.inputs if isinstance(batch, MicroBatch) else batch, 0)
