"""Predict memory and time of one rank's step, by simulating models with few layers if the layers are alike.

A `Ledger` (`plan/ledger.py`) holds the figures of a rank: bytes by phase and owner, seconds by operation, bytes sent.
Two short models are simulated, and each figure is extended linearly to the real number of layers; figures that do not
grow with it come from the longer one. See [Note: a few layers stand for all], `plan/ledger.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Any

import torch

from plait.config import (
    CUSTOM_MODELS,
    BatchConfig,
    HFConfig,
    MoeConfig,
    RunConfig,
    depth_of,
    resolve_batch,
    resolve_layout,
    with_depth,
)
from plait.models import build_model
from plait.plan.hardware import Hardware
from plait.plan.ledger import Ledger
from plait.plan.simulate import MakeExample, Simulated, TimeBudget, example_of, simulate

# The same run with fewer layers and micro-batches; see [Note: a few layers stand for all].


_MOST_GROUPS = 4
"""How many groups of layers the longest of the short models has."""
_SPARE_MICRO_BATCHES = 2
"""Micro-batches simulated beyond the number in flight in a pipeline: one that begins, one that ends."""


@dataclass(frozen=True, slots=True)
class Shorter:
    """A run description with fewer layers and micro-batches."""

    config: RunConfig
    layers: int
    """Layers of the rank that is simulated."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of layers and micro-batches of a run, for the ranks of one pipeline stage."""

    layers: int
    """Layers of the rank."""
    period: int
    """Layers per group; all groups are alike. 1 if all layers are."""
    head: int
    """Layers before the first group, which differ from those in groups."""
    micro_batches: int
    """Micro-batches of a step."""
    least_micro_batches: int
    """The fewest micro-batches with which memory reaches its peak."""

    @property
    def is_short(self) -> bool:
        """Whether there are so few layers that simulating fewer would not save time."""
        return self.layers <= self.head + 5 * self.period

    @property
    def groups(self) -> int:
        """The number of groups."""
        return (self.layers - self.head) // self.period

    @property
    def repeats(self) -> bool:
        """Whether there are more micro-batches than have to be simulated."""
        return self.micro_batches > self.least_micro_batches


def layers_of(config: RunConfig) -> int | None:
    """Return how many layers the described model has; None if that is not known or cannot be changed."""
    return None if isinstance(config.model, CUSTOM_MODELS) else depth_of(config.model)


def lengths_of(config: RunConfig, ranks: int, per_host: int, stage: int) -> Lengths | None:
    """Return the lengths of the run on a pipeline stage; None if it cannot be simulated with fewer layers."""
    layers = layers_of(config)
    strategy = config.strategy
    if layers is None or strategy.recompute.mode == "auto":
        return None
    layout = resolve_layout(strategy, size=ranks, local_size=per_host)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    period = every = strategy.recompute.every if strategy.recompute.mode == "every" else 1
    head = 0
    if isinstance(config.model, HFConfig):
        rhythm = _rhythm(config, layers, every)
        if rhythm is None:
            return None
        head, period = rhythm
    elif isinstance(config.model, MoeConfig):
        period = lcm(period, config.model.moe_every)
    least = 3
    if layout.pp > 1:
        if period > 1 or head or strategy.pipeline.split == "time":
            return None
        counts = _stage_layers(config, layout.pp)
        if strategy.pipeline.schedule not in ("1f1b", "gpipe") or min(counts) < 1:
            return None
        layers = counts[stage]
        least = (
            batch.accumulation if strategy.pipeline.schedule == "gpipe" else layout.pp - stage + _SPARE_MICRO_BATCHES
        )
    elif (layers - head) % period:
        return None
    return Lengths(layers, period, head, batch.accumulation, min(least, batch.accumulation))


def shortened(config: RunConfig, ranks: int, per_host: int, stage: int, groups: int, lengths: Lengths) -> Shorter:
    """Return the run with `groups` groups of layers on this stage, and the fewest micro-batches that suffice."""
    layers = lengths.head + groups * lengths.period
    strategy = config.strategy
    layout = resolve_layout(strategy, size=ranks, local_size=per_host)
    changes: dict[str, Any] = {}
    whole = layers
    if layout.pp > 1:
        counts = [layers if index == stage else 1 for index in range(layout.pp)]
        whole = sum(counts)
        firsts = [sum(counts[: index + 1]) for index in range(layout.pp - 1)]
        names = _layer_names(_with_layers(config, whole))
        pipeline = strategy.pipeline.model_copy(
            update={"split": tuple(names[first] for first in firsts), "micro_batches": lengths.least_micro_batches}
        )
        changes["strategy"] = strategy.model_copy(update={"pipeline": pipeline})
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    changes["batch"] = BatchConfig(micro=batch.micro, accumulation=lengths.least_micro_batches)
    return Shorter(_with_layers(config, whole).model_copy(update=changes), layers)


def _with_layers(config: RunConfig, layers: int) -> RunConfig:
    assert config.model is not None
    return config.model_copy(update={"model": with_depth(config.model, layers)})


def _rhythm(config: RunConfig, layers: int, every: int) -> tuple[int, int] | None:
    """Return (layers before the first group, layers per group) of a `transformers` model.

    A model may have dense layers before its mixtures of experts, or another kind of attention in every fourth layer.
    None if its layers are not found, or if a model with fewer layers would not have the same ones.
    """
    layer_types = _layer_types(config, layers)
    if layer_types is None:
        return None
    marked = [(layer_type, index % every) for index, layer_type in enumerate(layer_types)]
    periods = []
    for period in range(every, max(layers // 2, every) + 1, every):
        unlike = [index for index in range(period, layers) if marked[index] != marked[index - period]]
        head = unlike[-1] - period + 1 if unlike else 0
        head += (layers - head) % period
        periods.append((head, period))
    head, period = min(periods, key=lambda candidate: candidate[0] + _MOST_GROUPS * candidate[1])
    shorter = head + _MOST_GROUPS * period
    if shorter < layers and _layer_types(_with_layers(config, shorter), shorter) != layer_types[:shorter]:
        return None
    return head, period


def _layer_types(config: RunConfig, layers: int) -> list[object] | None:
    """Return a value per layer of a `transformers` model, equal for equal layers; None without `layers` layers."""
    assert config.model is not None
    with torch.device("meta"):
        model: Any = build_model(config.model)
    blocks = [module for module in model.modules() if isinstance(module, model.block_classes)]
    if len(blocks) != layers:
        return None
    text = model.config.get_text_config()
    types = [getattr(text, key, None) or [None] * layers for key in ("layer_types", "mlp_layer_types")]
    made_of = [tuple((name, param.shape, param.dtype) for name, param in block.named_parameters()) for block in blocks]
    return list(zip(made_of, *types, strict=False))


def _layer_names(config: RunConfig) -> list[str]:
    from plait.distributed import outline_of

    assert config.model is not None
    with torch.device("meta"):
        return list(outline_of(build_model(config.model, trust_code=config.trust_code)).layers)


def _stage_layers(config: RunConfig, stages: int) -> list[int]:
    """Return how many layers each pipeline stage gets."""
    from plait.distributed import plan_stages

    assert config.model is not None
    pipeline = config.strategy.pipeline
    with torch.device("meta"):
        model = build_model(config.model, trust_code=config.trust_code)
    plan = plan_stages(model, ranks=stages, schedule=pipeline.schedule, split=pipeline.split)
    return [end - start for start, end in pairwise(plan.bounds)]


_SPARE = 0.03
"""The allocator reserves at least this fraction more than the peak."""
_GROUPS = (2, 3)
"""The numbers of groups of layers in the two short models."""
_GATHERED = (3, 4)
"""The same with ZeRO-3: a layer's weights are gathered during the layer before, so more layers interact."""
Known = dict[tuple[str, int, int, bool], Simulated]
"""Simulations to reuse, by (run as JSON, ranks, rank, detailed): many plans of a search need the same short models.

They are valid for one machine, model object, loss function and example.
"""


def plan_rank(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    rank: int = 0,
    stage: int = 0,
    model: Any = None,
    loss_function: Any = None,
    make_example: MakeExample = example_of,
    received: Any = None,
    detailed: bool = False,
    exact: bool = False,
    known: Known | None = None,
    budget: TimeBudget | None = None,
) -> Simulated:
    """Return the memory and time of `rank`, which has the pipeline stage `stage`.

    With `exact` all layers are simulated, else a few: see [Note: a few layers stand for all]. Simulations in `known`
    are reused, and new ones are added to it. The other arguments are those of `simulate`.
    """
    options: dict[str, Any] = {
        "ranks": ranks,
        "rank": rank,
        "loss_function": loss_function,
        "make_example": make_example,
        "received": received,
        "detailed": detailed,
        "known": known,
        "budget": budget,
    }
    lengths = None if model is not None else lengths_of(config, ranks, hardware.per_host, stage)
    if lengths is None or exact or (lengths.is_short and not lengths.repeats):
        layers = 1 if lengths is None else lengths.layers
        return _simulated(config, hardware, model=model, layers=layers, **options)
    if lengths.is_short:
        return _from_few_micro_batches(config, hardware, lengths, stage, options)
    groups = _GATHERED if config.strategy.stage == 3 else _GROUPS
    shares = _shares(config)
    if not shares:
        return _from_few(config, hardware, lengths, stage, groups, options)

    def at(**corner: float) -> Simulated:
        offload = config.strategy.offload.model_copy(update={"ratio": 0.0, "host_ratio": 0.0, **corner})
        strategy = config.strategy.model_copy(update={"offload": offload})
        changed = config.model_copy(update={"strategy": strategy})
        return _from_few(changed, hardware, lengths, stage, groups, options)

    return _between(shares, at)


def _simulated(config: RunConfig, hardware: Hardware, *, known: Known | None, **options: Any) -> Simulated:
    if known is None:
        return simulate(config, hardware, **options)
    key = config.model_dump_json(), options["ranks"], options["rank"]
    for detailed in (True, False)[: 1 if options["detailed"] else 2]:
        if (*key, detailed) in known:
            return known[*key, detailed]
    simulated = known[*key, options["detailed"]] = simulate(config, hardware, **options)
    return simulated


def _from_few(
    config: RunConfig,
    hardware: Hardware,
    lengths: Lengths,
    stage: int,
    groups: tuple[int, int],
    options: dict[str, Any],
) -> Simulated:
    ranks = options["ranks"]
    few, more = (shortened(config, ranks, hardware.per_host, stage, count, lengths) for count in groups)
    short = _simulated(few.config, hardware, layers=few.layers, **options)
    longer = _simulated(more.config, hardware, layers=more.layers, **options)
    times = (lengths.groups - groups[0]) / (groups[1] - groups[0])
    ledger = short.ledger.stretched(longer.ledger, times)
    ledger = ledger.repeated(lengths.micro_batches / lengths.least_micro_batches)
    ledger = _completed(ledger, longer.ledger)
    # Notes of both models hold for any length; others count layers. FLOPs and trail are those of a short model.
    notes = [note for note in longer.notes if note in short.notes]
    return replace(longer, ledger=ledger, flops_per_token=None, trail=[], notes=notes)


def _from_few_micro_batches(
    config: RunConfig, hardware: Hardware, lengths: Lengths, stage: int, options: dict[str, Any]
) -> Simulated:
    """Return the figures of a simulation of all layers, extrapolated from the fewest micro-batches that suffice."""
    short = shortened(config, options["ranks"], hardware.per_host, stage, lengths.groups, lengths)
    simulated = _simulated(short.config, hardware, layers=short.layers, **options)
    ledger = simulated.ledger.repeated(lengths.micro_batches / lengths.least_micro_batches)
    return replace(simulated, ledger=ledger, flops_per_token=None, trail=[])


_NEARLY_ALL = 1.0 - 1e-9
"""A share so close to 1 that only the last parameter is not in it."""


def _shares(config: RunConfig) -> dict[str, float]:
    """Return the shares of an offloaded optimizer that stay on the device and in host memory, if they are not 0."""
    offload = config.strategy.offload
    shares = {"ratio": offload.share, "host_ratio": offload.host_ratio}
    return {key: share for key, share in shares.items() if share > 0}


def _between(shares: dict[str, float], at: Callable[..., Simulated]) -> Simulated:
    """Return memory and time of a run with `shares`, from simulations `at` shares of 0 and of nearly 1.

    [Note: shares] In a short model a share ends at another parameter than in a long one, so its figures cannot be
    extrapolated by layers. But they grow linearly with the share, from 0 to 1; a peak grows by at most that.
    """
    nothing = at()
    numbers = dict(nothing.ledger.numbers)
    for key, share in shares.items():
        everything = at(**{key: _NEARLY_ALL}).ledger.numbers
        for name in (numbers.keys() | everything.keys()) - {"host_rooms", "host_reading"}:
            base = nothing.ledger.numbers.get(name, 0.0)
            numbers[name] = numbers.get(name, 0.0) + share * (everything.get(name, 0.0) - base)
        # Reading a few tensors needs buffers as large as reading many.
        numbers["host_reading"] = max(numbers.get("host_reading", 0.0), everything.get("host_reading", 0.0))
    return replace(nothing, ledger=Ledger(numbers).settled())


def _completed(ledger: Ledger, sample: Ledger) -> Ledger:
    """Return the ledger with the figures that are not linear in the layers: the peak of the build, and `reserved`."""
    numbers = dict(ledger.numbers)
    numbers["peak.build"] = max(numbers["peak.build"], sample.numbers["peak.build"])
    # Beyond the peak, the allocator reserves a few blocks of the largest sizes, for any number of layers.
    spare = max(sample.numbers["reserved"] - sample.peak[1], _SPARE * ledger.peak[1])
    numbers["reserved"] = ledger.peak[1] + spare
    return Ledger(numbers).settled()
