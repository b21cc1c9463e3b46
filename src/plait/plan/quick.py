"""Estimate memory and time of many combinations of settings, from simulations of a few.

See [Note: a quick look, then a close one]. Terms in this file: a *sample* is the `Ledger` (memory and time figures of
one rank) of a simulated step with one micro-batch, with the combination's tensor, context and expert parallelism but
without pipeline stages, sharding and offload of states. A *share* is the fraction of an offloaded optimizer that is
updated on the device (`strategy.offload.ratio`).

Weights, gradients and optimizer state are divided as the ZeRO stage and the offload settings say. Activations are
scaled by samples and layers. Time is that of the sample, scaled, plus the communication along the other axes and the
work of the host. The error is about 10 %.

[Note: the smallest and the largest] Where one sample keeps a device busy, as a long text does, time and memory are
proportional to the number of samples. A small image does not keep it busy: the time of one says nothing about a
thousand. Then the smallest and the largest micro-batch are both simulated, and sizes between them are interpolated
linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.config import (
    BatchConfig,
    Layout,
    OffloadConfig,
    ResolvedBatch,
    RunConfig,
    resolve_batch,
    resolve_graphs,
    resolve_layout,
)
from plait.errors import PlaitError, in_one_line
from plait.optim import device_buffer_bytes, host_need, state_bytes
from plait.plan.hardware import Hardware
from plait.plan.ledger import CUDA_PROCESS_GIB, Away, Ledger, device_updates, host_work, mode_of
from plait.plan.rankplan import layers_of, plan_rank
from plait.plan.shares import best_share
from plait.plan.simulate import MakeExample

if TYPE_CHECKING:
    from plait.plan.search import SearchResult

# The estimated memory of a combination of settings, from its sample.


GIB = 2**30
_UNITS = 8
"""Weights gathered unit by unit, and gradients copied to the host as they are computed, use 1/8 of their full size."""


class Weights(NamedTuple):
    """Bytes of one pipeline stage's weights and gradients, before sharding."""

    computed: float
    """Of the weights in the format of the computation."""
    kept: float
    """Of the separate fp32 weights for the update; 0 in fp32 runs, which have no separate ones."""
    gradients: float
    numbers: float
    """The number of weights, not bytes."""


def weights_of(sample: Ledger, config: RunConfig, layout: Layout) -> Weights:
    """Return the bytes of weights and gradients of one pipeline stage, from a sample."""
    categories, pp = sample.under("part"), layout.pp
    whole, gradients = categories.get("parameters", 0.0) / pp, categories.get("gradients", 0.0) / pp
    narrow = config.precision.compute in ("bf16", "fp16")
    computed = whole / 3 if narrow and config.precision.master else whole
    return Weights(computed, whole - computed, gradients, computed / (2 if narrow else 4))


def shards_of(config: RunConfig, layout: Layout) -> int:
    """Return into how many shards weights, gradients and optimizer state are divided; 1 without ZeRO."""
    return layout.dp_shard * layout.cp if config.strategy.stage else 1


def device_gib(
    sample: Ledger, config: RunConfig, hardware: Hardware, layout: Layout, batch: ResolvedBatch, share: float
) -> float:
    """Return the GiB that a device needs if `share` of an offloaded optimizer is updated there."""
    offload, categories = config.strategy.offload, sample.under("part")
    shards, weights = shards_of(config, layout), weights_of(sample, config, layout)
    on_device = share if offload.on else 1.0
    memory = (weights.kept + categories.get("optimizer", 0.0) / layout.pp) / shards * on_device
    memory += _computing(weights, config, shards)
    streams = batch.accumulation == 1 and _streams(config, layout)
    memory += _gradients(weights, config.strategy.stage, shards, max(on_device, 1 / _UNITS) if streams else None)
    under_way = min(layout.pp, batch.accumulation)
    transient = sum(categories.get(name, 0.0) for name in ("temporaries", "communication", "kernel workspaces"))
    # With few samples the peak may be in the update, when activations are freed: then take those of the forward peak.
    forward = (
        sample.numbers.get("peak.forward", 0.0) - categories.get("parameters", 0.0) - categories.get("optimizer", 0.0)
    )
    activations = max(categories.get("activations", 0.0), forward - transient)
    memory += activations * under_way / layout.pp + transient
    if offload.on and device_updates(config, hardware, layout):
        memory += device_buffer_bytes(weights.numbers / shards * (1.0 - on_device), state_bytes(config))
    return memory * 1.03 / GIB + hardware.context_gib


def _computing(weights: Weights, config: RunConfig, shards: int) -> float:
    """Return the bytes of weights in the compute format: all below stage 3, else a shard and the gathered units."""
    offload, updated = config.strategy.offload, weights.kept == 0  # whether the update changes these same tensors
    if offload.params != "none":
        return weights.computed / _UNITS
    if config.strategy.stage == 0:
        return weights.computed
    if config.strategy.stage < 3:
        return weights.computed / (shards if updated and not offload.on else 1)
    return weights.computed / _UNITS + (weights.computed / shards if updated or offload.on else 0.0)


def _gradients(weights: Weights, stage: int, shards: int, left: float | None) -> float:
    """Return the bytes of gradients. `left`: the fraction on the device at a time; None: all are, until the step."""
    if left is not None:
        return weights.gradients / shards * left
    gathered = weights.computed / _UNITS if stage == 2 and weights.kept else 0.0
    return weights.gradients / (shards if stage >= 2 else 1) + gathered


def _streams(config: RunConfig, layout: Layout) -> bool:
    """Return whether gradients are copied to the host during the backward pass."""
    sharded = config.strategy.stage > 0 or layout.replicas == 1
    return config.strategy.offload.on and sharded and layout.pp == 1


def host_gib(sample: Ledger, config: RunConfig, hardware: Hardware, layout: Layout, share: float) -> float:
    """Return the GiB of host memory that the ranks of one host need; 0 on CPUs, where it is the device's memory."""
    if hardware.kind == "cpu":
        return 0.0
    need = 0.0
    if config.strategy.offload.on:
        offload = config.strategy.offload.model_copy(update={"ratio": share})
        strategy = config.strategy.model_copy(update={"offload": offload})
        numbers = weights_of(sample, config, layout).numbers / shards_of(config, layout)
        need = host_need(config.model_copy(update={"strategy": strategy}), int(numbers)) / GIB
    return (CUDA_PROCESS_GIB + need) * min(layout.size, hardware.per_host)


# The estimated step time of a combination of settings, from its sample.


def seconds_of(
    sample: Ledger,
    config: RunConfig,
    hardware: Hardware,
    layout: Layout,
    batch: ResolvedBatch,
    share: float,
    state: float,
    bubble: float,
) -> float:
    """Return the seconds of a step if `share` of an offloaded optimizer is updated on the device.

    `state`: bytes of optimizer state per weight; `bubble`: the fraction of the step in which the pipeline is idle.
    """
    pp, shards, offload = layout.pp, shards_of(config, layout), config.strategy.offload
    weights = weights_of(sample, config, layout)
    on_device = share if offload.on else 1.0
    forward, backward = (sample.total("compute", phase) / pp for phase in ("forward", "backward"))
    compute = batch.accumulation * (forward + backward) + sample.total("compute", "step") / pp / shards * on_device
    waited = batch.accumulation * sample.total("waited") / pp
    host = batch.accumulation * (sample.total("host", "forward") + sample.total("host", "backward")) / pp
    sent = _data_parallel_bytes(weights, config.strategy.stage, layout, batch.accumulation)
    link = hardware.link_between(layout.replicas, layout.tp)
    # Offloaded activations are copied with each micro-batch.
    carried = max(sample.numbers.get(f"link.{way}.each", 0.0) for way in ("in", "out")) * batch.accumulation / pp
    seconds = max(compute + waited, host, sent / (link.gbps * 1e9), carried)
    if offload.params != "none" and hardware.kind == "cuda":
        seconds = max(seconds, _fetching(weights.computed / shards, config, hardware, layout, batch.accumulation))
    seconds /= 1.0 - bubble
    if not offload.on:
        return seconds
    numbers = weights.numbers / shards
    in_files = numbers * (1.0 - on_device - offload.host_ratio) if offload.optimizer == "nvme" else 0.0
    on_host = numbers * (1.0 - on_device) - in_files
    wide = batch.accumulation > 1 or layout.replicas > 1 or config.strategy.stage == 3
    back = 0.0 if offload.params != "none" else on_host + in_files
    away = Away(on_host, in_files, back)
    work = host_work(away, config, hardware, layout, state=state, wide=wide)
    leaving = weights.computed / shards * (1.0 - on_device) * (2 if wide else 1) / (hardware.pcie_gbps * 1e9)
    seconds += max(0.0, leaving - backward) if hardware.kind == "cuda" and offload.optimizer == "cpu" else 0.0
    return seconds + work.shows(mode_of(config, layout, hardware.kind), forward=forward, step=seconds)


def _fetching(shard: float, config: RunConfig, hardware: Hardware, layout: Layout, micro_batches: int) -> float:
    """Return the seconds of copying offloaded weights to the device, twice per micro-batch (forward and backward)."""
    moved = 2.0 * micro_batches * shard
    seconds = moved / (hardware.pcie_gbps * 1e9)
    if config.strategy.offload.params == "nvme":
        seconds = max(seconds, moved * min(layout.size, hardware.per_host) / (hardware.disk_gbps * 1e9))
    return seconds


def _data_parallel_bytes(weights: Weights, stage: int, layout: Layout, micro_batches: int) -> float:
    """Return about how many bytes a rank sends per step to gather parameters and to reduce gradients."""
    ranks = layout.replicas
    others = (ranks - 1) / ranks
    if stage == 0:
        return 2 * others * weights.gradients
    gathers = 2 * micro_batches if stage == 3 else 1
    scatters = 1 if stage == 1 else micro_batches
    return others * (weights.computed * gathers + weights.gradients * scatters)


@dataclass(frozen=True, slots=True)
class Quick:
    """The estimated memory and time of a combination of settings."""

    needed_gib: float
    """Memory of each device."""
    host_gib: float
    """Host memory of one host."""
    seconds: float
    """Of a step."""
    tokens_per_second: float
    """Of all ranks together."""
    share: float
    """The fraction of an offloaded optimizer that is updated on the device; for `ratio: auto`, `best_share`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Results that the estimates of many combinations share, each computed once."""

    smallest: int
    """Samples of the smallest micro-batch of all combinations."""
    largest: int
    """Samples of the largest one."""
    samples: dict[Any, Ledger | str] = field(default_factory=dict)
    """(Tensor, context and expert parallelism, recomputation, …, micro-batch size) → sample, or why there is none."""
    bubbles: dict[Any, float] = field(default_factory=dict)
    """(Schedule, stages, micro-batches, stages per rank) → idle fraction of the pipeline."""

    def bubble(self, config: RunConfig, layout: Layout, batch: ResolvedBatch) -> float:
        """Return the idle fraction of the pipeline; 0 without a pipeline."""
        if layout.pp == 1:
            return 0.0
        from plait.distributed import theoretical_bubble

        pipeline = config.strategy.pipeline
        key = pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank
        if key not in self.bubbles:
            self.bubbles[key] = theoretical_bubble(*key)
        return self.bubbles[key]


def estimate_all(
    candidates: Sequence[SearchResult], hardware: Hardware, ranks: int, make_example: MakeExample
) -> list[Quick | str]:
    """Return an estimate of each candidate, in the same order; a text with the reason where there is none."""
    configs = [candidate.config for candidate in candidates if candidate.config is not None]
    assert len(configs) == len(candidates), "an account belongs to a way by its place in the list"
    sizes = [_micro(config, hardware, ranks) for config in configs] or [1]
    seen = Seen(min(sizes), max(sizes))
    looked: list[Quick | str] = []
    for config in configs:
        try:
            looked.append(_look(config, hardware, ranks, seen, make_example=make_example))
        except PlaitError as error:
            looked.append(in_one_line(error))
    return looked


def estimate(
    config: RunConfig, hardware: Hardware, ranks: int, *, seen: Seen | None = None, **options: Any
) -> Quick | str:
    """Return an estimate of one run; a text with the reason where there is none.

    `options` are those of `plan_rank`, such as a model object. `seen` has the results that it shares with estimates of
    other runs; this run's micro-batch must be between its `smallest` and `largest`.
    """
    micro = _micro(config, hardware, ranks)
    try:
        return _look(config, hardware, ranks, Seen(micro, micro) if seen is None else seen, **options)
    except PlaitError as error:
        return in_one_line(error)


def _cut(config: RunConfig, hardware: Hardware, ranks: int) -> tuple[Layout, ResolvedBatch]:
    """Return the layout and the batch sizes of a run on `ranks` ranks."""
    layout = resolve_layout(config.strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    micro_batches = config.strategy.pipeline.micro_batches
    return layout, resolve_batch(config.batch, layout.data_parallel, micro_batches=micro_batches)


def _micro(config: RunConfig, hardware: Hardware, ranks: int) -> int:
    """Return the samples of a run's micro-batch; 1 if the settings are invalid."""
    try:
        return _cut(config, hardware, ranks)[1].micro
    except PlaitError:
        return 1


def _look(config: RunConfig, hardware: Hardware, ranks: int, seen: Seen, **options: Any) -> Quick | str:
    strategy = config.strategy
    layout, batch = _cut(config, hardware, ranks)
    if layout.pp > 1:
        from plait.distributed import check_pipeline

        check_pipeline(strategy.pipeline, layout.pp, batch.accumulation)
        if layout.pp > (layers_of(config) or layout.pp):
            return f"{layout.pp} pipeline stages, but fewer layers"
    described = options.get("model") is None and options.get("loss_function") is None
    config = resolve_graphs(config, ranks=ranks, accumulation=batch.accumulation, described=described)
    key = (layout.tp, layout.cp, layout.ep, strategy.recompute.mode, strategy.compile.enabled, config.strategy.graphs)

    def sampled(micro: int) -> Ledger | str:
        if (*key, micro) not in seen.samples:
            seen.samples[*key, micro] = _sample(config, hardware, layout, micro, **options)
        return seen.samples[*key, micro]

    # A recorded CUDA graph has a fixed micro-batch, and its host time does not tell whether the device is busy.
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
        sample = sample.stretched([(large, (batch.micro - smallest) / (seen.largest - smallest))]).settled()
    return _from_sample(sample, config, hardware, layout, batch, seen.bubble(config, layout, batch))


def _sample(config: RunConfig, hardware: Hardware, layout: Layout, micro: int, **options: Any) -> Ledger | str:
    """Return the sample of a micro-batch size (see the top of this file); a text with the reason if there is none."""
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
        return plan_rank(alone, hardware, ranks=ranks, detailed=True, **options).ledger
    except PlaitError as error:
        return in_one_line(error)


def _from_sample(
    sample: Ledger, config: RunConfig, hardware: Hardware, layout: Layout, batch: ResolvedBatch, bubble: float
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
