"""The memory of a way to spread a run, from one micro-batch of it where nothing is spread: the quick account's."""

from __future__ import annotations

from typing import NamedTuple

from plait.config import Layout, ResolvedBatch, RunConfig
from plait.parallel import host_need, room_bytes, state_bytes
from plait.plan.account import Account
from plait.plan.hardware import Hardware
from plait.plan.host import CUDA_PROCESS_GIB
from plait.plan.hosted import device_updates

GIB = 2**30
_UNITS = 8
"""Of weights that come and go unit by unit, and of gradients that leave at once, about one part in so many is there."""


class Weights(NamedTuple):
    """Bytes of one pipeline stage's weights and gradients, where nothing is shared out."""

    computed: float
    """In the format that computes."""
    kept: float
    """In fp32 beside those, for the update; of fp32 runs these are the same tensors."""
    gradients: float
    numbers: float
    """How many there are."""


def weights_of(sample: Account, config: RunConfig, layout: Layout) -> Weights:
    """The weights in a sample."""
    parts, pp = sample.under("part"), layout.pp
    whole, gradients = parts.get("parameters", 0.0) / pp, parts.get("gradients", 0.0) / pp
    narrow = config.precision.compute in ("bf16", "fp16")
    computed = whole / 3 if narrow and config.precision.master else whole
    return Weights(computed, whole - computed, gradients, computed / (2 if narrow else 4))


def shards_of(config: RunConfig, layout: Layout) -> int:
    """Into how many parts the states are cut."""
    return layout.dp_shard * layout.cp if config.strategy.stage else 1


def device_gib(
    sample: Account, config: RunConfig, hardware: Hardware, layout: Layout, batch: ResolvedBatch, share: float
) -> float:
    """Memory that a device needs where `share` of an offloaded optimizer stays there."""
    offload, parts = config.strategy.offload, sample.under("part")
    shards, weights = shards_of(config, layout), weights_of(sample, config, layout)
    here = share if offload.on else 1.0
    memory = (weights.kept + parts.get("optimizer", 0.0) / layout.pp) / shards * here
    memory += _computing(weights, config, shards)
    streams = batch.accumulation == 1 and _streams(config, layout)
    memory += _gradients(weights, config.strategy.stage, shards, max(here, 1 / _UNITS) if streams else None)
    under_way = min(layout.pp, batch.accumulation)
    moving = sum(parts.get(part, 0.0) for part in ("temporaries", "communication", "kernel workspaces"))
    # With few samples the highest moment may be the update, when no activation is left: the forward pass tells too.
    forward = sample.numbers.get("peak.forward", 0.0) - parts.get("parameters", 0.0) - parts.get("optimizer", 0.0)
    activations = max(parts.get("activations", 0.0), forward - moving)
    memory += activations * under_way / layout.pp + moving
    if offload.on and device_updates(config, hardware, layout):
        memory += room_bytes(weights.numbers / shards * (1.0 - here), state_bytes(config))
    return memory * 1.03 / GIB + hardware.context_gib


def _computing(weights: Weights, config: RunConfig, shards: int) -> float:
    """The weights that compute: whole below stage 3, else this rank's part of them and the units in use."""
    offload, updated = config.strategy.offload, weights.kept == 0  # whether the update works on these very tensors
    if offload.params != "none":
        return weights.computed / _UNITS
    if config.strategy.stage == 0:
        return weights.computed
    if config.strategy.stage < 3:
        return weights.computed / (shards if updated and not offload.on else 1)
    return weights.computed / _UNITS + (weights.computed / shards if updated or offload.on else 0.0)


def _gradients(weights: Weights, stage: int, shards: int, left: float | None) -> float:
    """Of those that leave during the backward pass, a part is `left`; None: they stay until the step."""
    if left is not None:
        return weights.gradients / shards * left
    gathered = weights.computed / _UNITS if stage == 2 and weights.kept else 0.0
    return weights.gradients / (shards if stage >= 2 else 1) + gathered


def _streams(config: RunConfig, layout: Layout) -> bool:
    """Whether gradients leave the device during the backward pass."""
    sharded = config.strategy.stage > 0 or layout.replicas == 1
    return config.strategy.offload.on and sharded and layout.pp == 1


def host_gib(sample: Account, config: RunConfig, hardware: Hardware, layout: Layout, share: float) -> float:
    """Memory that the ranks of one host take of it; 0 where a device is the host."""
    if hardware.kind == "cpu":
        return 0.0
    need = 0.0
    if config.strategy.offload.on:
        offload = config.strategy.offload.model_copy(update={"ratio": share})
        strategy = config.strategy.model_copy(update={"offload": offload})
        numbers = weights_of(sample, config, layout).numbers / shards_of(config, layout)
        need = host_need(config.model_copy(update={"strategy": strategy}), int(numbers)) / GIB
    return (CUDA_PROCESS_GIB + need) * min(layout.size, hardware.per_host)
