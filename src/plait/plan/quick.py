"""A quick account of many ways to spread a run, from simulations of a few; see [Note: a quick look, then a close one].

States follow the table of ZeRO stages and tiers, activations grow with samples and layers, and time is what the same
layers took on tensor-parallel ranks alone, with the messages of the other axes and the work of the host added. It is
good to about a tenth.

[Note: the smallest and the largest] Where one sample keeps a device busy, as a long text does, more of them take so
many times as much. A small image does not: what is computed for one says nothing about a thousand. Then the largest
micro-batch is simulated beside the smallest, and what lies between them lies on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.config import (
    BatchConfig,
    Layout,
    OffloadConfig,
    ResolvedBatch,
    RunConfig,
    resolve_batch,
    resolve_layout,
    with_graphs_decided,
)
from plait.errors import PlaitError, in_one_line
from plait.parallel import state_bytes
from plait.plan.account import Account
from plait.plan.hardware import Hardware
from plait.plan.quick_memory import device_gib, host_gib
from plait.plan.quick_time import seconds_of
from plait.plan.rankplan import plan_rank
from plait.plan.shares import best_share
from plait.plan.shorten import layers_of
from plait.plan.simulate import MakeExample

if TYPE_CHECKING:
    from plait.plan.ways import Found


@dataclass(frozen=True, slots=True)
class Quick:
    """About what a way takes."""

    needed_gib: float
    host_gib: float
    seconds: float
    tokens_per_second: float
    share: float
    """Of the weights that are updated on the device though the optimizer is offloaded; for `ratio: auto` the best."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What many ways have in common, found out once."""

    smallest: int
    """Samples of the smallest micro-batch of all ways."""
    largest: int
    """And of the largest."""
    samples: dict[Any, Account | str] = field(default_factory=dict)
    """By how a layer is shared and recomputed, and by the size of a micro-batch."""
    bubbles: dict[Any, float] = field(default_factory=dict)
    """By schedule, stages and micro-batches."""

    def bubble(self, config: RunConfig, layout: Layout, batch: ResolvedBatch) -> float:
        """The idle share of a pipeline; 0 where there is none."""
        if layout.pp == 1:
            return 0.0
        from plait.parallel import theoretical_bubble

        pipeline = config.strategy.pipeline
        key = pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank
        if key not in self.bubbles:
            self.bubbles[key] = theoretical_bubble(*key)
        return self.bubbles[key]


def quick_look(found: Sequence[Found], hardware: Hardware, ranks: int, make_example: MakeExample) -> list[Quick | str]:
    """An account of each; a reason where it cannot be."""
    configs = [each.config for each in found if each.config is not None]
    assert len(configs) == len(found), "an account belongs to a way by its place in the list"
    sizes = [_micro(config, hardware, ranks) for config in configs] or [1]
    seen = Seen(min(sizes), max(sizes))
    looked: list[Quick | str] = []
    for config in configs:
        try:
            looked.append(_look(config, hardware, ranks, seen, make_example=make_example))
        except PlaitError as error:
            looked.append(in_one_line(error))
    return looked


def quick_of(
    config: RunConfig, hardware: Hardware, ranks: int, *, seen: Seen | None = None, **options: Any
) -> Quick | str:
    """An account of one run; `options` are those of `plan_rank`: the model, where it is not described.

    `seen` has what it has in common with other runs whose micro-batches lie between the same two.
    """
    micro = _micro(config, hardware, ranks)
    try:
        return _look(config, hardware, ranks, Seen(micro, micro) if seen is None else seen, **options)
    except PlaitError as error:
        return in_one_line(error)


def _cut(config: RunConfig, hardware: Hardware, ranks: int) -> tuple[Layout, ResolvedBatch]:
    """How a way cuts the model and the batch."""
    layout = resolve_layout(config.strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    micro_batches = config.strategy.pipeline.micro_batches
    return layout, resolve_batch(config.batch, layout.data_parallel, micro_batches=micro_batches)


def _micro(config: RunConfig, hardware: Hardware, ranks: int) -> int:
    """Samples of a way's micro-batch; 1 where it makes no run."""
    try:
        return _cut(config, hardware, ranks)[1].micro
    except PlaitError:
        return 1


def _look(config: RunConfig, hardware: Hardware, ranks: int, seen: Seen, **options: Any) -> Quick | str:
    strategy = config.strategy
    layout, batch = _cut(config, hardware, ranks)
    if layout.pp > 1:
        from plait.parallel import check_pipeline

        check_pipeline(strategy.pipeline, layout.pp, batch.accumulation)
        if layout.pp > (layers_of(config) or layout.pp):
            return f"{layout.pp} pipeline stages, but fewer layers"
    described = options.get("model") is None and options.get("loss_function") is None
    config = with_graphs_decided(config, ranks=ranks, accumulation=batch.accumulation, described=described)
    key = (layout.tp, layout.cp, layout.ep, strategy.recompute.mode, strategy.compile.enabled, config.strategy.graphs)

    def sampled(micro: int) -> Account | str:
        if (*key, micro) not in seen.samples:
            seen.samples[*key, micro] = _sample(config, hardware, layout, micro, **options)
        return seen.samples[*key, micro]

    # What is recorded has one micro-batch, and its host has nothing to do that would tell how busy the device is.
    smallest = batch.micro if config.strategy.graphs is True else seen.smallest
    sample = sampled(smallest)
    if isinstance(sample, str):
        return sample
    computed, queued = (sum(sample.total(what, p) for p in ("forward", "backward")) for what in ("compute", "host"))
    if computed > queued:
        sample = sample.widened(batch.micro / smallest)
    elif batch.micro > smallest:  # see [Note: the smallest and the largest]
        large = sampled(seen.largest)
        if isinstance(large, str):
            return large
        sample = sample.stretched(large, (batch.micro - smallest) / (seen.largest - smallest)).settled()
    return _from_sample(sample, config, hardware, layout, batch, seen.bubble(config, layout, batch))


def _sample(config: RunConfig, hardware: Hardware, layout: Layout, micro: int, **options: Any) -> Account | str:
    """One micro-batch a step on as many ranks as share a layer: no pipeline, nothing sharded, no state away."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": 1, "dp_replicate": None, "dp_shard": None}
    strategy = config.strategy.model_copy(
        update={
            "layout": config.strategy.layout.model_copy(update=sizes),
            "zero": 0,
            "sharding": None,
            "pipeline": type(config.strategy.pipeline)(),
            "offload": OffloadConfig(activations=config.strategy.offload.activations),
        }
    )
    alone = config.model_copy(update={"strategy": strategy, "batch": BatchConfig(micro=micro, accumulation=1)})
    try:
        ranks = layout.tp * layout.cp * layout.ep
        return plan_rank(alone, hardware, ranks=ranks, detailed=True, **options).account
    except PlaitError as error:
        return in_one_line(error)


def _from_sample(
    sample: Account, config: RunConfig, hardware: Hardware, layout: Layout, batch: ResolvedBatch, bubble: float
) -> Quick:
    state = state_bytes(config) if config.strategy.offload.on else 0.0

    def needed(share: float) -> float:
        return device_gib(sample, config, hardware, layout, batch, share)

    def seconds(share: float) -> float:
        return seconds_of(sample, config, hardware, layout, batch, share, state, bubble)

    share = config.strategy.offload.share
    if config.strategy.offload.ratio == "auto":
        share = best_share(seconds, needed, hardware.memory_gib)
    took, host = seconds(share), host_gib(sample, config, hardware, layout, share)
    return Quick(needed(share), host, took, sample.numbers["tokens"] / batch.micro * batch.total / took, share)
