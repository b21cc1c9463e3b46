"""What to change when a run does not fit: one rung after the other, cheapest first, until one does.

[Note: up the ladder, and down again] The last rung may save so much that some before it were not needed: with weights
shared out, the optimizer can stay on the device. So those are taken back that the run fits without, the dearest first.
A micro-batch of 1, where it stays, then grows to the largest for which there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """All changes up to here."""
    added: Candidate
    """Those of this rung."""
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
        added = Candidate(
            {key: value for key, value in change.items() if key not in settings or settings[key] != value}
        )
        settings = {**settings, **change}
        candidate = Candidate(dict(settings))
        try:
            plan = make_plan(candidate.applied_to(config), hardware, ranks=ranks, detailed=False, **options)
        except PlaitError as error:
            yield Rung(candidate, added, None, in_one_line(error))
            continue
        yield Rung(candidate, added, plan)
        if plan.fits:
            return


def taken_back(config: RunConfig, hardware: Hardware, rungs: Sequence[Rung], *, ranks: int, **options: Any) -> Rung:
    """The last of `rungs`, which fits, without those before it that are not needed."""
    least, needed = rungs[-1], [rung.added.settings for rung in rungs]
    for index in reversed(range(len(rungs) - 1)):
        fewer = [*needed[:index], *needed[index + 1 :]]
        candidate = Candidate({key: value for change in fewer for key, value in change.items()})
        if candidate.settings == least.candidate.settings:  # a later rung has the last word on it
            needed = fewer
            continue
        try:
            plan = make_plan(candidate.applied_to(config), hardware, ranks=ranks, detailed=False, **options)
        except PlaitError:
            continue  # what came later rests on it
        if plan.fits:
            least, needed = Rung(candidate, rungs[-1].added, plan), fewer
    return _larger_micro(config, hardware, least, ranks=ranks, **options)


def _larger_micro(config: RunConfig, hardware: Hardware, rung: Rung, *, ranks: int, **options: Any) -> Rung:
    """A rung that fits with a micro-batch of 1, with the largest that fits too: memory grows evenly with it."""
    if rung.plan is None or rung.candidate.settings.get("batch.micro") != 1:
        return rung

    def at(micro: int) -> Rung:
        candidate = Candidate({**rung.candidate.settings, "batch.micro": micro})
        plan = make_plan(candidate.applied_to(config), hardware, ranks=ranks, detailed=False, **options)
        return Rung(candidate, rung.added, plan)

    written = _micro(config, ranks, hardware)
    try:
        whole = at(written).plan
        assert whole is not None
        grows = (whole.needed_gib - rung.plan.needed_gib) / (written - 1)
        most = 1 + (hardware.memory_gib - rung.plan.needed_gib) / max(grows, 1e-9)
        sizes = [size for size in range(2, written) if written % size == 0 and size <= most]
        return next((found for size in reversed(sizes[-2:]) if (found := at(size)).fits), rung)
    except PlaitError:
        return rung  # another layout takes no other micro-batch


def _micro(config: RunConfig, ranks: int, hardware: Hardware) -> int:
    layout = resolve_layout(config.strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    return resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches).micro


def _changes(config: RunConfig, ranks: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    strategy, per_host = config.strategy, hardware.per_host
    layout = resolve_layout(strategy, size=ranks, local_size=min(ranks, per_host))
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if config.checkpoint.async_save:
        yield {"checkpoint.async_save": False}
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
