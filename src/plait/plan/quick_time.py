"""The time of a way to spread a run, from one micro-batch of it where nothing is spread: the quick account's."""

from __future__ import annotations

from plait.config import Layout, ResolvedBatch, RunConfig
from plait.plan.account import Account
from plait.plan.hardware import Hardware
from plait.plan.hosted import Away, host_work, mode_of
from plait.plan.quick_memory import Weights, shards_of, weights_of


def seconds_of(
    sample: Account,
    config: RunConfig,
    hardware: Hardware,
    layout: Layout,
    batch: ResolvedBatch,
    share: float,
    state: float,
    bubble: float,
) -> float:
    """How long a step takes where `share` of an offloaded optimizer stays on the device.

    `state`: bytes that the optimizer keeps for each number; `bubble`: the idle share of the pipeline.
    """
    pp, shards, offload = layout.pp, shards_of(config, layout), config.strategy.offload
    weights = weights_of(sample, config, layout)
    here = share if offload.on else 1.0
    forward, backward = (sample.total("compute", phase) / pp for phase in ("forward", "backward"))
    compute = batch.accumulation * (forward + backward) + sample.total("compute", "step") / pp / shards * here
    waited = batch.accumulation * sample.total("waited") / pp
    host = batch.accumulation * (sample.total("host", "forward") + sample.total("host", "backward")) / pp
    sent = _data_parallel_bytes(weights, config.strategy.stage, layout, batch.accumulation)
    link = hardware.link_between(layout.replicas, layout.tp)
    # Activations that wait on the host travel with each micro-batch.
    carried = max(sample.numbers.get(f"link.{way}.each", 0.0) for way in ("in", "out")) * batch.accumulation / pp
    seconds = max(compute + waited, host, sent / (link.gbps * 1e9), carried)
    if offload.params != "none" and hardware.kind == "cuda":
        seconds = max(seconds, _fetching(weights.computed / shards, config, hardware, layout, batch.accumulation))
    seconds /= 1.0 - bubble
    if not offload.on:
        return seconds
    numbers = weights.numbers / shards
    in_files = numbers * (1.0 - here - offload.host_ratio) if offload.optimizer == "nvme" else 0.0
    on_host = numbers * (1.0 - here) - in_files
    wide = batch.accumulation > 1 or layout.replicas > 1 or config.strategy.stage == 3
    back = 0.0 if offload.params != "none" else on_host + in_files
    away = Away(on_host, in_files, back)
    work = host_work(away, config, hardware, layout, state=state, wide=wide)
    leaving = weights.computed / shards * (1.0 - here) * (2 if wide else 1) / (hardware.pcie_gbps * 1e9)
    seconds += max(0.0, leaving - backward) if hardware.kind == "cuda" and offload.optimizer == "cpu" else 0.0
    return seconds + work.shows(mode_of(config, layout, hardware.kind), forward=forward, step=seconds)


def _fetching(own: float, config: RunConfig, hardware: Hardware, layout: Layout, micro_batches: int) -> float:
    """Weights that live on the host or in files come twice with each micro-batch: forward, and back."""
    moved = 2.0 * micro_batches * own
    seconds = moved / (hardware.pcie_gbps * 1e9)
    if config.strategy.offload.params == "nvme":
        seconds = max(seconds, moved * min(layout.size, hardware.per_host) / (hardware.disk_gbps * 1e9))
    return seconds


def _data_parallel_bytes(weights: Weights, stage: int, layout: Layout, micro_batches: int) -> float:
    """Bytes that a rank sends to bring parameters and gradients together, about."""
    ranks = layout.replicas
    part = (ranks - 1) / ranks
    if stage == 0:
        return 2 * part * weights.gradients
    gathers = 2 * micro_batches if stage == 3 else 1
    scatters = 1 if stage == 1 else micro_batches
    return part * (weights.computed * gathers + weights.gradients * scatters)
