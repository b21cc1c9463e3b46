"""Predict memory and time of one rank's step, by simulating models with few layers of each kind.

A `Ledger` (`plan/ledger.py`) holds the figures of a rank: bytes by phase and owner, seconds by operation, bytes sent.
The shortest model that has all kinds of layers is simulated, and for each kind one with one layer more; each figure is
extended linearly to the real numbers of layers. Figures that do not grow with them come from the longest of these
models. See [Note: a few layers stand for all], `plan/ledger.py`, and `plan/layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from plait.config import CUSTOM_MODELS, BatchConfig, RunConfig, depth_of, resolve_batch, resolve_layout
from plait.models import build_model
from plait.plan.hardware import Hardware
from plait.plan.layers import LayerSample, sample_layers, without_layers
from plait.plan.ledger import Ledger
from plait.plan.simulate import MakeExample, Simulated, TimeBudget, TimeUpError, example_of, simulate

# The same run with fewer layers and micro-batches; see [Note: a few layers stand for all].


_SPARE_MICRO_BATCHES = 2
"""Micro-batches simulated beyond the number in flight in a pipeline: one that begins, one that ends."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of layers and micro-batches of a run, for the ranks of one pipeline stage."""

    sample: LayerSample
    """The layers that are simulated."""
    split: tuple[str, ...]
    """The first layers of all pipeline stages but the first; empty without a pipeline."""
    micro_batches: int
    """Micro-batches of a step."""
    least_micro_batches: int
    """The fewest micro-batches with which memory reaches its peak."""

    @property
    def is_short(self) -> bool:
        """Whether there are so few layers that simulating fewer would not save time."""
        return not self.sample.longer

    @property
    def all_layers(self) -> int:
        """The number of layers of the rank."""
        return self.sample.layers + len(self.sample.skipped)

    @property
    def repeats(self) -> bool:
        """Whether there are more micro-batches than have to be simulated."""
        return self.micro_batches > self.least_micro_batches


def layers_of(config: RunConfig) -> int | None:
    """Return how many layers the described model has; None if its section does not say."""
    return None if isinstance(config.model, CUSTOM_MODELS) else depth_of(config.model)


def lengths_of(config: RunConfig, ranks: int, per_host: int, stage: int) -> Lengths | None:
    """Return the lengths of the run on a pipeline stage; None if it cannot be simulated with fewer layers."""
    strategy = config.strategy
    if config.model is None or isinstance(config.model, CUSTOM_MODELS) or strategy.recompute.mode == "auto":
        return None
    layout = resolve_layout(strategy, size=ranks, local_size=per_host)
    pipeline = strategy.pipeline
    if layout.pp > 1 and (pipeline.split == "time" or pipeline.schedule not in ("1f1b", "gpipe")):
        return None
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)
    least, among, split = 3, None, tuple[str, ...]()
    try:
        with torch.device("meta"):
            model = _build(config)
    except (RuntimeError, NotImplementedError):  # its constructor reads values
        return None
    if layout.pp > 1:
        from plait.distributed import plan_stages

        stages = plan_stages(model, ranks=layout.pp, schedule=pipeline.schedule, split=pipeline.split)
        among = stages.layers_of(stage)
        split = tuple(stages.outline.layers[first] for first in stages.bounds[1:-1])
        least = batch.accumulation if pipeline.schedule == "gpipe" else layout.pp - stage + _SPARE_MICRO_BATCHES
    every = strategy.recompute.every if strategy.recompute.mode == "every" else 1
    sample = sample_layers(model, among=among, every=every, gathered=strategy.stage == 3)
    return Lengths(sample, split, batch.accumulation, min(least, batch.accumulation))


def _build(config: RunConfig) -> nn.Module:
    assert config.model is not None
    return build_model(config.model, trust_code=config.trust_code)


def shortened(config: RunConfig, ranks: int, per_host: int, lengths: Lengths) -> RunConfig:
    """Return the run with the fewest micro-batches that suffice, and with its pipeline split where it is."""
    strategy = config.strategy
    layout = resolve_layout(strategy, size=ranks, local_size=per_host)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    changes: dict[str, Any] = {"batch": BatchConfig(micro=batch.micro, accumulation=lengths.least_micro_batches)}
    if layout.pp > 1:
        pipeline = strategy.pipeline.model_copy(
            update={"split": lengths.split, "micro_batches": lengths.least_micro_batches}
        )
        changes["strategy"] = strategy.model_copy(update={"pipeline": pipeline})
    return config.model_copy(update=changes)


_SPARE = 0.03
"""The allocator reserves at least this fraction more than the peak."""
Known = dict[tuple[str, frozenset[str], int, int, bool], Simulated]
"""Simulations to reuse, by (run as JSON, layers left out, ranks, rank, detailed): many plans of a search need the same.

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
        layers = 1 if lengths is None else lengths.all_layers
        return _simulated(config, hardware, model=model, layers=layers, **options)
    if lengths.is_short:
        return _from_few(config, hardware, lengths, options)
    try:
        return _from_few_with_shares(config, hardware, lengths, options)
    except TimeUpError:
        raise
    except Exception:
        # Some models cannot do without a layer, as when a later one uses what it has computed. What is wrong with the
        # run itself is raised again with all layers.
        all_layers = replace(lengths, sample=LayerSample(frozenset(), lengths.all_layers, ()))
        return _from_few(config, hardware, all_layers, options)


_ROUNDING = 0.03
"""The share of the peak up to which a part of it that is below zero is taken for zero."""


class _NotAdditiveError(Exception):
    """A figure of a model is not the sum of those of its layers."""


def _from_few_with_shares(
    config: RunConfig, hardware: Hardware, lengths: Lengths, options: dict[str, Any]
) -> Simulated:
    shares = _shares(config)
    if not shares:
        return _from_few(config, hardware, lengths, options)

    def at(**corner: float) -> Simulated:
        offload = config.strategy.offload.model_copy(update={"ratio": 0.0, "host_ratio": 0.0, **corner})
        strategy = config.strategy.model_copy(update={"offload": offload})
        return _from_few(config.model_copy(update={"strategy": strategy}), hardware, lengths, options)

    return _between(shares, at)


def _simulated(
    config: RunConfig,
    hardware: Hardware,
    *,
    known: Known | None,
    skipped: frozenset[str] = frozenset(),
    model: Any = None,
    **options: Any,
) -> Simulated:
    key = config.model_dump_json(), skipped, options["ranks"], options["rank"]
    for detailed in (True, False)[: 1 if options["detailed"] else 2]:
        if known is not None and (*key, detailed) in known:
            return known[*key, detailed]
    if skipped:
        model = without_layers(partial(_build, config), skipped)
    simulated = simulate(config, hardware, model=model, **options)
    if known is not None:
        known[*key, options["detailed"]] = simulated
    return simulated


def _from_few(config: RunConfig, hardware: Hardware, lengths: Lengths, options: dict[str, Any]) -> Simulated:
    """Return the figures of all layers and micro-batches, from simulations of a few."""
    short, sample = shortened(config, options["ranks"], hardware.per_host, lengths), lengths.sample
    base = _simulated(short, hardware, skipped=sample.skipped, layers=sample.layers, **options)
    longer = [
        (_simulated(short, hardware, skipped=more.skipped, layers=more.layers, **options), more.times)
        for more in sample.longer
    ]
    ledger = base.ledger.stretched([(more.ledger, times) for more, times in longer])
    # A peak may lie an operation earlier or later in a longer model: a little less than nothing is nothing.
    least = -_ROUNDING * ledger.peak[1]
    numbers = {
        key: 0 if key.startswith(("at.", "part.")) and least <= n < 0 else n for key, n in ledger.numbers.items()
    }
    ledger = replace(ledger, numbers=numbers)
    if any(value < 0 for value in ledger.numbers.values()):
        raise _NotAdditiveError(f"{min(ledger.numbers, key=ledger.numbers.__getitem__)} would be below zero")
    ledger = ledger.repeated(lengths.micro_batches / lengths.least_micro_batches)
    notes = base.notes
    for more, _ in longer:
        ledger = _completed(ledger, more.ledger)
        # Notes of all models hold for any length; others count layers. FLOPs and trail are those of a short model.
        notes = [note for note in more.notes if note in notes]
    return replace(base, ledger=ledger, flops_per_token=None, trail=[], notes=notes)


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
