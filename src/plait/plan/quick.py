"""A quick account of many ways to spread a run, from simulations of a few; see [Note: a quick look, then a close one].

States follow the table of ZeRO stages, activations grow with samples and layers, and time is what the same layers took
on tensor-parallel ranks alone, with the messages of the other axes added. It is good to about a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.config.batch import ResolvedBatch, resolve_batch
from plait.config.layout import Layout, resolve_layout
from plait.config.run import RunConfig
from plait.config.train import BatchConfig
from plait.errors import PlaitError, in_one_line
from plait.plan.account import Account
from plait.plan.hardware import Hardware
from plait.plan.rankplan import plan_rank
from plait.plan.shorten import layers_of
from plait.plan.simulate import MakeExample

if TYPE_CHECKING:
    from plait.plan.ways import Found

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Quick:
    """About what a way takes."""

    needed_gib: float
    seconds: float
    tokens_per_second: float


def quick_look(found: Sequence[Found], hardware: Hardware, ranks: int, make_example: MakeExample) -> list[Quick | str]:
    """An account of each; a reason where it cannot be."""
    samples: dict[Any, Account | str] = {}
    looked: list[Quick | str] = []
    for each in found:
        assert each.config is not None
        try:
            looked.append(_look(each.config, hardware, ranks, samples, make_example))
        except PlaitError as error:
            looked.append(in_one_line(error))
    return looked


def _look(
    config: RunConfig, hardware: Hardware, ranks: int, samples: dict[Any, Account | str], make_example: MakeExample
) -> Quick | str:
    strategy = config.strategy
    layout = resolve_layout(strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if layout.pp > 1:
        from plait.parallel.pipeline import check_pipeline

        check_pipeline(strategy.pipeline, layout.pp, batch.accumulation)
        if layout.pp > (layers_of(config) or layout.pp):
            return f"{layout.pp} pipeline stages, but fewer layers"
    key = layout.tp, layout.cp, layout.ep, strategy.recompute.mode, strategy.compile.enabled
    if key not in samples:
        samples[key] = _sample(config, hardware, layout, make_example)
    sample = samples[key]
    return sample if isinstance(sample, str) else _from_sample(sample, config, hardware, layout, batch)


def _sample(config: RunConfig, hardware: Hardware, layout: Layout, make_example: MakeExample) -> Account | str:
    """One sample a step on as many ranks as share a layer, nothing sharded, no pipeline."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": 1, "dp_replicate": None, "dp_shard": None}
    strategy = config.strategy.model_copy(
        update={
            "layout": config.strategy.layout.model_copy(update=sizes),
            "zero": 0,
            "sharding": None,
            "pipeline": type(config.strategy.pipeline)(),
        }
    )
    alone = config.model_copy(update={"strategy": strategy, "batch": BatchConfig(micro=1, accumulation=1)})
    try:
        ranks = layout.tp * layout.cp * layout.ep
        return plan_rank(alone, hardware, ranks=ranks, make_example=make_example, detailed=True, groups=(2, 3)).account
    except PlaitError as error:
        return in_one_line(error)


def _from_sample(sample: Account, config: RunConfig, hardware: Hardware, layout: Layout, batch: ResolvedBatch) -> Quick:
    stage, shards, pp = config.strategy.stage, layout.dp_shard * layout.cp, layout.pp
    parts = sample.under("part")
    weights, gradients = parts.get("parameters", 0.0) / pp, parts.get("gradients", 0.0) / pp
    rounded = weights / 3 if config.precision.compute in ("bf16", "fp16") and config.precision.master else 0.0
    kept = weights - rounded  # in fp32, beside those that compute
    under_way = min(pp, batch.accumulation)
    memory = {
        0: kept + rounded + gradients,
        1: kept / shards + rounded + gradients,
        2: kept / shards + rounded + gradients / shards + rounded / 8,
        3: kept / shards + rounded / 8 + gradients / shards,
    }[stage]
    memory += parts.get("optimizer", 0.0) / pp / (shards if stage else 1)
    per_sample = parts.get("activations", 0.0)
    memory += per_sample * batch.micro * under_way / pp
    moving = ("temporaries", "communication", "kernel workspaces")
    memory += sum(parts.get(part, 0.0) for part in moving) * batch.micro
    needed = memory * 1.03 / GIB + hardware.context_gib

    rounds = batch.micro * batch.accumulation
    compute = rounds * (sample.total("compute", "forward") + sample.total("compute", "backward")) / pp
    compute += sample.total("compute", "step") / pp / (shards if stage else 1)
    waited = rounds * sample.total("waited") / pp
    host = batch.accumulation * (sample.total("host", "forward") + sample.total("host", "backward")) / pp
    sent = _data_parallel_bytes(weights, rounded or weights, gradients, stage, layout, batch.accumulation)
    replicas = layout.replicas
    link = hardware.link_between(replicas, layout.tp)
    seconds = max(compute + waited, host, sent / (link.gbps * 1e9))
    if pp > 1:
        from plait.parallel.pipeline import theoretical_bubble

        pipeline = config.strategy.pipeline
        idle = theoretical_bubble(pipeline.schedule, pp, batch.accumulation, pipeline.stages_per_rank)
        seconds /= 1.0 - idle
    tokens = sample.numbers["tokens"] * batch.total
    return Quick(needed, seconds, tokens / seconds)


def _data_parallel_bytes(
    weights: float, computed: float, gradients: float, stage: int, layout: Layout, micro_batches: int
) -> float:
    """Bytes that a rank sends to bring parameters and gradients together, about."""
    ranks = layout.replicas
    share = (ranks - 1) / ranks
    if stage == 0:
        return 2 * share * gradients
    gathers = 2 * micro_batches if stage == 3 else 1
    scatters = 1 if stage == 1 else micro_batches
    return share * (computed * gathers + gradients * scatters)
