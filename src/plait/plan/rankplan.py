"""What a rank's step takes, from a few layers where all are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plait.config import RunConfig
from plait.plan.account import Account
from plait.plan.example import example_of
from plait.plan.hardware import Hardware
from plait.plan.patience import Patience
from plait.plan.shorten import Lengths, lengths_of, shortened
from plait.plan.simulate import MakeExample, Simulated, simulate

_SPARE = 0.03
"""The allocator keeps at least this share of the peak beyond need."""
_GROUPS = (2, 3)
"""How many groups of layers the two short models have."""
_GATHERED = (3, 4)
"""The same where weights are gathered layer by layer: the next ones come ahead, so a layer has others around it."""
Known = dict[tuple[str, int, int, bool], Simulated]
"""What was simulated before, by run, ranks, rank and detail: many plans of one search need the same short models.

It holds for one machine, model, loss and example.
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
    patience: Patience | None = None,
) -> Simulated:
    """Simulate `rank`, which has the pipeline stage `stage`.

    Whole where `exact`, else [Note: a few layers stand for all]. What is in `known` is not simulated again, and what is
    simulated is put there.
    """
    options: dict[str, Any] = {
        "ranks": ranks,
        "rank": rank,
        "loss_function": loss_function,
        "make_example": make_example,
        "received": received,
        "detailed": detailed,
        "known": known,
        "patience": patience,
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
    found = known[*key, options["detailed"]] = simulate(config, hardware, **options)
    return found


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
    account = short.account.stretched(longer.account, times)
    account = account.repeated(lengths.micro_batches / lengths.least_micro_batches)
    account = _completed(account, longer.account)
    # What both say holds for any length; a count of layers is that of the short model, as are FLOPs and trail.
    notes = [note for note in longer.notes if note in short.notes]
    return replace(longer, account=account, flops_per_token=None, trail=[], notes=notes)


def _from_few_micro_batches(
    config: RunConfig, hardware: Hardware, lengths: Lengths, stage: int, options: dict[str, Any]
) -> Simulated:
    """All layers, and as few micro-batches as will do."""
    short = shortened(config, options["ranks"], hardware.per_host, stage, lengths.groups, lengths)
    found = _simulated(short.config, hardware, layers=short.layers, **options)
    account = found.account.repeated(lengths.micro_batches / lengths.least_micro_batches)
    return replace(found, account=account, flops_per_token=None, trail=[])


_NEARLY_ALL = 1.0 - 1e-9
"""A share that leaves only the last parameter."""


def _shares(config: RunConfig) -> dict[str, float]:
    """Shares of the weights whose state stays on the device or in host memory."""
    offload = config.strategy.offload
    found = {"ratio": offload.share, "host_ratio": offload.host_ratio}
    return {key: share for key, share in found.items() if share > 0}


def _between(shares: dict[str, float], at: Callable[..., Simulated]) -> Simulated:
    """What a run with shares takes, from runs `at` which there is none, or nearly all.

    [Note: shares] In a short model a share ends at another parameter than in a long one, so it cannot be stretched by
    layers. But what a step takes grows with the share itself, from nothing to all; a peak grows by at most that.
    """
    nothing = at()
    numbers = dict(nothing.account.numbers)
    for key, share in shares.items():
        everything = at(**{key: _NEARLY_ALL}).account.numbers
        for name in (numbers.keys() | everything.keys()) - {"host_rooms", "host_reading"}:
            base = nothing.account.numbers.get(name, 0.0)
            numbers[name] = numbers.get(name, 0.0) + share * (everything.get(name, 0.0) - base)
        # A few tensors are read by way of as much memory as many.
        numbers["host_reading"] = max(numbers.get("host_reading", 0.0), everything.get("host_reading", 0.0))
    return replace(nothing, account=Account(numbers).settled())


def _completed(account: Account, sample: Account) -> Account:
    """What does not grow by the same amount with each layer: the build, one module at a time, and the allocator's."""
    numbers = dict(account.numbers)
    numbers["peak.build"] = max(numbers["peak.build"], sample.numbers["peak.build"])
    # What the allocator keeps beyond need is a few pieces of the largest sizes, however many layers there are.
    spare = max(sample.numbers["reserved"] - sample.peak[1], _SPARE * account.peak[1])
    numbers["reserved"] = account.peak[1] + spare
    return Account(numbers).settled()
