"""What to change when a run does not fit: one rung after the other, cheapest first, until one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.config import resolve_batch, resolve_layout
from plait.config.run import RunConfig
from plait.errors import PlaitError, in_one_line
from plait.plan.candidate import Candidate
from plait.plan.hardware import Hardware
from plait.plan.plan import Plan, make_plan


@dataclass(frozen=True, slots=True)
class Rung:
    """Settings beyond those before, and what the run would take with all of them."""

    candidate: Candidate
    plan: Plan | None
    reason: str = ""
    """Why there is no plan."""

    @property
    def fits(self) -> bool:
        """Whether the run fits from here on."""
        return self.plan is not None and self.plan.fits


def climb(config: RunConfig, hardware: Hardware, *, ranks: int, **options: Any) -> Iterator[Rung]:
    """Rung by rung up to the first that fits. Each keeps the global batch and the losses."""
    settings: dict[str, Any] = {}
    for change in _changes(config, ranks, hardware):
        settings = {**settings, **change}
        candidate = Candidate(dict(settings))
        try:
            plan = make_plan(candidate.applied_to(config), hardware, ranks=ranks, detailed=False, **options)
        except PlaitError as error:
            yield Rung(candidate, None, in_one_line(error))
            continue
        yield Rung(candidate, plan)
        if plan.fits:
            return


def _changes(config: RunConfig, ranks: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    strategy, per_host = config.strategy, hardware.per_host
    layout = resolve_layout(strategy, size=ranks, local_size=min(ranks, per_host))
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if batch.micro > 1:
        yield {"batch.total": batch.total, "batch.micro": 1, "batch.accumulation": None}
    if strategy.recompute.mode == "none":
        yield {"strategy.recompute.mode": "selective"}
    if strategy.recompute.mode != "full":
        yield {"strategy.recompute.mode": "full"}
    clear: dict[str, Any] = {} if strategy.sharding is None else {"strategy.sharding": None}
    free = {f"strategy.layout.{axis}": None for axis in ("dp_replicate", "dp_shard")}
    spreads, has_host = layout.data_parallel > 1, hardware.kind == "cuda"
    for stage in (1, 2):
        if spreads and stage > strategy.stage:
            yield {**clear, **free, "strategy.zero": stage}
    if has_host and strategy.offload.optimizer == "none":
        yield {"strategy.offload.optimizer": "cpu"}
    if spreads and strategy.stage < 3:
        yield {**clear, **free, "strategy.zero": 3}
    if has_host and strategy.offload.params == "none":
        yield {**clear, "strategy.zero": 3, "strategy.offload.params": "cpu"}
    if has_host and strategy.offload.optimizer != "nvme":
        yield {"strategy.offload.optimizer": "nvme"}
    tensor = layout.tp * 2
    while tensor <= min(per_host, ranks) and layout.pp * tensor * layout.cp * layout.ep <= ranks:
        yield {"strategy.layout.tp": tensor, "strategy.tensor.sequence_parallel": True}
        tensor *= 2
