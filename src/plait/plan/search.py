"""Search the settings that spread a run over a machine (layout, ZeRO stage, recomputation, offload, micro-batch).

All combinations are returned, from the fastest that fits to those that do not, each of these with a reason.

[Note: a quick look, then a close one] There are hundreds of combinations, and a simulation of one takes a second or
two. So a few are simulated first, with tensor parallelism alone: one for each of its sizes and each recomputation mode.
From their memory and time, scaled by layers and samples, all others are estimated (`Quick`). The best by these
estimates are then simulated themselves, and the simulated figures are the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config import RunConfig, resolve_layout
from plait.errors import ConfigError, PlaitError, in_one_line
from plait.plan.hardware import Hardware
from plait.plan.plan import GIB, Plan, make_plan
from plait.plan.quick import Quick, estimate_all
from plait.plan.shares import SHARE, with_share
from plait.plan.simulate import MakeExample, example_of
from plait.plan.space import Candidate, Space, candidates, useful_dimensions

_AWAY = 0.03
"""How much faster, as a fraction, a combination must be for each further tier that it offloads to (`_tiers`): a
prediction may be off by that much, and offload depends on host resources that other programs may also use."""
_MARGIN = 1.1
"""Estimated memory may be too high by this factor: a combination is simulated up to the device's memory times it."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One combination of settings, and what is known about it."""

    candidate: Candidate
    config: RunConfig | None
    reason: str
    """Why it is invalid, too large or not simulated; empty for one that was simulated and fits."""
    quick: Quick | None = None
    """The estimate; None if there is none."""
    plan: Plan | None = None
    """The simulation; None if there was none."""

    @property
    def tokens_per_second(self) -> float:
        """Predicted by the simulation, or else by the estimate; 0 without either."""
        if self.plan is not None:
            return self.plan.tokens_per_second
        return 0.0 if self.quick is None else self.quick.tokens_per_second

    @property
    def score(self) -> float:
        """Results are sorted by this: tokens per second, less a small part for each tier that the run offloads to."""
        return self.tokens_per_second * (1.0 - _AWAY * _tiers(self.config))


@dataclass(frozen=True, slots=True)
class Search:
    """The results of a search, best first: those that were simulated and fit, then the others."""

    results: tuple[SearchResult, ...]
    seconds: float
    """How long the search took."""

    @property
    def best(self) -> SearchResult | None:
        """The fastest that fits, by its `score`; None where nothing does."""
        return next((result for result in self.results if result.plan is not None and not result.reason), None)


def search(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    close: int = 8,
    seconds: float = 50.0,
    space: Space | None = None,
    make_example: MakeExample = example_of,
    log: Callable[[str], None] = lambda text: None,
) -> Search:
    """Return all combinations of settings, each with an estimate, and the best simulated until `close` of them fit.

    Once one fits, no simulation is begun after `seconds`. `space` says what is varied; `log` is called with a line of
    text on the number of combinations.
    """
    start = time.monotonic()
    space = space or Space(ranks, useful_dimensions(hardware.kind, ("zero", "layout", "recompute", "micro", "offload")))
    legal, refused = _legal(candidates(config, space), config, ranks)
    log(f"{len(legal)} combinations of settings, {len(refused)} more are invalid")
    estimates = estimate_all(legal, hardware, ranks, make_example)
    promising, large = [], []
    for result, quick in zip(legal, estimates, strict=True):
        if isinstance(quick, str):
            refused.append(replace(result, reason=quick))
        elif quick.needed_gib > hardware.memory_gib * _MARGIN:
            reason = f"needs about {quick.needed_gib:.0f} GiB of {hardware.memory_gib:.0f}"
            large.append(replace(result, quick=quick, reason=reason))
        elif quick.host_gib > hardware.host_memory_gib * _MARGIN:
            reason = f"needs about {quick.host_gib:.0f} GiB of the host's {hardware.host_memory_gib:.0f}"
            large.append(replace(result, quick=quick, reason=reason))
        else:
            promising.append(_with_share(replace(result, quick=quick), quick.share))
    promising.sort(key=lambda result: -result.score)
    simulated: list[SearchResult] = []
    time_is_up = False
    for index, result in enumerate(promising):
        fitting = sum(not other.reason for other in simulated)
        time_is_up = bool(fitting) and time.monotonic() - start > seconds
        if fitting >= close or time_is_up:
            promising = promising[index:]
            break
        simulated.append(_simulated(result, hardware, ranks, make_example))
    else:
        promising = []
    fits = sorted((result for result in simulated if not result.reason), key=lambda result: -result.score)
    fails = [result for result in simulated if result.reason]
    why = "not simulated: the search's time was up" if time_is_up else "not simulated: slower by the quick estimate"
    rest = [replace(result, reason=why) for result in promising]
    return Search((*fits, *rest, *fails, *large, *refused), time.monotonic() - start)


def _legal(proposals: Sequence[Candidate], run: RunConfig, ranks: int) -> tuple[list[SearchResult], list[SearchResult]]:
    """Return (candidates that are valid runs, one of each that would be the same run; invalid ones with the reason)."""
    legal, refused = [], []
    seen: set[str] = set()
    for candidate in proposals:
        try:
            config = candidate.applied_to(run)
            key = _same(config, ranks)
        except ConfigError as error:
            refused.append(SearchResult(candidate, None, in_one_line(error)))
            continue
        if key not in seen:
            seen.add(key)
            legal.append(SearchResult(candidate, config, ""))
    return legal, refused


def _tiers(config: RunConfig | None) -> int:
    """Return how much a run offloads: 1 for the optimizer, 1 more if it is in files, 1 more for the weights."""
    if config is None:
        return 0
    offload = config.strategy.offload
    return offload.on + (offload.optimizer == "nvme") + (offload.params != "none")


def _with_share(result: SearchResult, share: float) -> SearchResult:
    """Return a result with a number for `strategy.offload.ratio: auto`."""
    assert result.config is not None
    if result.config.strategy.offload.ratio != "auto":
        return result
    candidate = Candidate({**result.candidate.settings, SHARE: share})
    return replace(result, candidate=candidate, config=with_share(result.config, share))


def _same(config: RunConfig, ranks: int) -> str:
    """Return a key that is equal for runs that do the same: with one copy of the model, all ZeRO stages are alike."""
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    data: dict[str, Any] = config.model_dump(mode="json", include={"strategy", "batch"})
    data["strategy"] |= {"zero": config.strategy.stage if layout.replicas > 1 else 0, "layout": layout.sizes()}
    data["strategy"]["sharding"] = None
    return json.dumps(data, sort_keys=True)


def _simulated(result: SearchResult, hardware: Hardware, ranks: int, make_example: MakeExample) -> SearchResult:
    assert result.config is not None
    try:
        plan = make_plan(result.config, hardware, ranks=ranks, make_example=make_example, detailed=False)
    except PlaitError as error:
        return replace(result, reason=in_one_line(error))
    reason = ""
    if plan.needed_gib > hardware.memory_gib:
        phase, peak = plan.fullest.ledger.peak
        reason = (
            f"needs {plan.needed_gib:.1f} GiB of {hardware.memory_gib:.1f}: "
            f"{peak / GIB:.1f} in the {phase} phase of the {plan.fullest.name}"
        )
    elif plan.host_gib > hardware.host_memory_gib:
        least = f"needs {plan.host_gib:.0f} GiB of the host's {hardware.host_memory_gib:.0f}"
        reason = f"{least}, in the {plan.host_phase} phase"
    return replace(result, plan=plan, reason=reason)


def _too_large(quick: Quick, hardware: Hardware) -> bool:
    return quick.needed_gib > hardware.memory_gib or quick.host_gib > hardware.host_memory_gib


def order_by_estimate(
    config: RunConfig, proposals: Sequence[Candidate], hardware: Hardware, ranks: int
) -> list[Candidate]:
    """Return candidates ordered by their estimates: the fastest first, and those that are too large last.

    Invalid ones, and those without an estimate, are left out.
    """
    legal, _ = _legal(proposals, config, ranks)
    estimates = estimate_all(legal, hardware, ranks, example_of)
    pairs = zip(legal, estimates, strict=True)
    known = [(replace(result, quick=quick), quick) for result, quick in pairs if not isinstance(quick, str)]
    known.sort(key=lambda pair: (_too_large(pair[1], hardware), -pair[0].score))
    return [result.candidate for result, _ in known]
