"""What a rank's step takes, from a few layers where all are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.config.run import RunConfig
from plait.plan.account import Account
from plait.plan.example import example_of
from plait.plan.hardware import Hardware
from plait.plan.shorten import lengths_of, shortened
from plait.plan.simulate import MakeExample, Simulated, simulate

_SPARE = 0.03
"""The allocator keeps at least this share of the peak beyond need."""
_FEW, _MORE = 3, 4
"""Groups of layers of the two short models: with three there is one that is neither first nor last."""


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
    groups: tuple[int, int] = (_FEW, _MORE),
) -> Simulated:
    """Simulate `rank`, which has the pipeline stage `stage`: whole where `exact`, else by [Note: a few layers].

    `groups` says how long the two short models are.
    """
    options: dict[str, Any] = {
        "ranks": ranks,
        "rank": rank,
        "loss_function": loss_function,
        "make_example": make_example,
        "received": received,
        "detailed": detailed,
    }
    lengths = None if model is not None else lengths_of(config, ranks, hardware.per_host, stage)
    # A share of the weights that stays on the device does not grow by the same amount with each layer.
    if lengths is None or lengths.is_short or exact or config.strategy.offload.ratio > 0:
        layers = 1 if lengths is None else lengths.layers
        return simulate(config, hardware, model=model, layers=layers, **options)
    few, more = (shortened(config, ranks, hardware.per_host, stage, count, lengths) for count in groups)
    short = simulate(few.config, hardware, layers=few.layers, **options)
    longer = simulate(more.config, hardware, layers=more.layers, **options)
    times = (lengths.layers / lengths.period - groups[0]) / (groups[1] - groups[0])
    account = short.account.stretched(longer.account, times)
    account = account.repeated(lengths.micro_batches / lengths.least_micro_batches)
    account = _completed(account, longer.account)
    return replace(longer, account=account, flops_per_token=None, trail=[])  # those of the short model


def _completed(account: Account, sample: Account) -> Account:
    """What does not grow by the same amount with each layer: the build, one module at a time, and the allocator's."""
    numbers = dict(account.numbers)
    numbers["peak.build"] = max(numbers["peak.build"], sample.numbers["peak.build"])
    # What the allocator keeps beyond need is a few pieces of the largest sizes, however many layers there are.
    spare = max(sample.numbers["reserved"] - sample.peak[1], _SPARE * account.peak[1])
    numbers["reserved"] = account.peak[1] + spare
    return Account(numbers)
