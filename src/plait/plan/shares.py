"""Which share of an offloaded optimizer's work stays on the device: `ratio: auto`.

[Note: why a share] The device updates weights many times faster than the host, and has room for some of them. With a
larger share the host has less to do, until its part takes no longer than the forward pass beside it; from there on a
larger share only takes memory. So of all shares that fit, the smallest is taken that is about as fast as the fastest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Any

from plait.config import RunConfig
from plait.errors import ConfigError, Problem
from plait.plan.hardware import Hardware

if TYPE_CHECKING:
    from plait.plan.plan import Plan

SHARE = "strategy.offload.ratio"
HOST_SHARE = "strategy.offload.host_ratio"
STEPS = 20
"""Shares are looked at in steps of one part in so many."""
_USABLE = 0.95
"""Of the device's memory, what a share may be planned to fill: the quick account may be off."""
_ALIKE = 1.01
"""Two shares are as fast as each other where they differ by less."""


def best_share(seconds: Callable[[float], float], needed: Callable[[float], float], memory: float) -> float:
    """The best share, given what a step takes with one, and the memory that it needs; 0 where none fits."""
    fitting = [step / STEPS for step in range(STEPS) if needed(step / STEPS) <= memory * _USABLE]
    if not fitting:
        return 0.0
    fastest = min(seconds(share) for share in fitting)
    return next(share for share in fitting if seconds(share) <= fastest * _ALIKE)


def with_ratio(config: RunConfig, hardware: Hardware, *, ranks: int, **options: Any) -> RunConfig:
    """The run with a number for `ratio: auto`: the quick account's, or less where a simulation finds that too much."""
    if config.strategy.offload.ratio != "auto":
        return config
    from plait.plan.plan import make_plan
    from plait.plan.quick import estimate

    quick = estimate(config, hardware, ranks, **options)
    if isinstance(quick, str):
        raise ConfigError(Problem(SHARE, f"auto, but the run cannot be planned: {quick}", "Write a number."))
    share = quick.share
    while share > 0:
        lowered = with_share(config, share)
        if make_plan(lowered, hardware, ranks=ranks, detailed=False, **options).fits:
            return lowered
        share = round(max(share - 2 / STEPS, 0.0), 4)
    return with_share(config, 0.0)


def lowered_shares(config: RunConfig, plan_with: Callable[[dict[str, Any]], Plan]) -> dict[str, float]:
    """Settings with the largest shares, up to those that the run says, that fit; the smallest where none do.

    [Note: what leaves the device goes to the host first] Of an optimizer in files, a part that has left the
    device joins the share in host memory, where the run has one and the host has room; what is left goes to files,
    which are slower. A run with shares is planned from runs with none and with nearly all ([Note: shares]), so once
    these are known, any other share is a matter of adding.
    """
    offload = config.strategy.offload
    ratio, host = offload.share, offload.host_ratio

    def shares_with(share: float) -> dict[str, float]:
        """With so much on the device, and as much in host memory as it has room for."""
        on_device = {SHARE: share} if ratio > 0 else {}
        if host == 0:
            return on_device

        def has_room(host_share: float) -> bool:
            plan = plan_with({**on_device, HOST_SHARE: host_share})
            return plan.host_gib <= plan.hardware.host_memory_gib

        return {**on_device, HOST_SHARE: _largest(round(host + ratio - share, 4), has_room)}

    return shares_with(_largest(ratio, lambda share: plan_with(shares_with(share)).fits))


def _largest(most: float, fits: Callable[[float], bool]) -> float:
    """The largest of `most` and the steps below it that fits; 0 where none does. Less always needs less."""
    steps = [most, *(step / STEPS for step in reversed(range(ceil(round(most * STEPS, 6)))))]
    return steps[min(bisect_left(steps, True, key=fits), len(steps) - 1)]


def with_share(config: RunConfig, share: float) -> RunConfig:
    """The run with a number for how much of an offloaded optimizer's work stays on the device."""
    offload = config.strategy.offload.model_copy(update={"ratio": share})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"offload": offload})})
