"""Choose `strategy.offload.ratio: auto`: the *share* of an offloaded optimizer that is updated on the device.

[Note: why a share] The device updates weights many times faster than the host, and its memory has room for some of
them. With a larger share the host has less work, until its part takes no longer than the forward pass that it overlaps
with; from there on a larger share only uses memory. So of all shares that fit, the smallest is chosen that is about as
fast as the fastest.
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
"""Shares are tried in steps of 1/20."""
_USABLE = 0.95
"""The fraction of the device's memory that a run may need by the estimate, which has an error."""
_ALIKE = 1.01
"""Two shares count as equally fast if their step times differ by less than this factor."""


def best_share(seconds: Callable[[float], float], needed: Callable[[float], float], memory: float) -> float:
    """Return the best share, given the seconds of a step and the GiB needed as functions of it; 0 if none fits."""
    fitting = [step / STEPS for step in range(STEPS) if needed(step / STEPS) <= memory * _USABLE]
    if not fitting:
        return 0.0
    fastest = min(seconds(share) for share in fitting)
    return next(share for share in fitting if seconds(share) <= fastest * _ALIKE)


def with_ratio(config: RunConfig, hardware: Hardware, *, ranks: int, **options: Any) -> RunConfig:
    """Return the run with a number for `ratio: auto`: the estimated best, or less if a simulation does not fit."""
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
    """Return settings with the largest shares that fit, up to those of the run; the smallest shares if none fit.

    [Note: what leaves the device goes to the host first] If the optimizer is in files, the part that no longer fits on
    the device is added to the part in host memory (`host_ratio`), where the run has one and the host has room; the
    rest goes to files, which are slower. A run with shares is interpolated between simulations with a share of 0 and
    of nearly 1 ([Note: shares]), so once these are done, any other share needs no further simulation.
    """
    offload = config.strategy.offload
    ratio, host = offload.share, offload.host_ratio

    def shares_with(share: float) -> dict[str, float]:
        """Return settings with `share` on the device, and as large a part in host memory as fits."""
        on_device = {SHARE: share} if ratio > 0 else {}
        if host == 0:
            return on_device

        def has_room(host_share: float) -> bool:
            plan = plan_with({**on_device, HOST_SHARE: host_share})
            return plan.host_gib <= plan.hardware.host_memory_gib

        return {**on_device, HOST_SHARE: _largest(round(host + ratio - share, 4), has_room)}

    return shares_with(_largest(ratio, lambda share: plan_with(shares_with(share)).fits))


def _largest(most: float, fits: Callable[[float], bool]) -> float:
    """Return the largest of `most` and the steps below it that fits; 0 if none does. Smaller ones need less memory."""
    steps = [most, *(step / STEPS for step in reversed(range(ceil(round(most * STEPS, 6)))))]
    return steps[min(bisect_left(steps, True, key=fits), len(steps) - 1)]


def with_share(config: RunConfig, share: float) -> RunConfig:
    """Return the run with this number as the share of an offloaded optimizer that is updated on the device."""
    offload = config.strategy.offload.model_copy(update={"ratio": share})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"offload": offload})})
