"""All ways to spread a run over a machine, from the fastest that fits to those that do not, each with its reason.

[Note: a quick look, then a close one] There are hundreds of ways, and a simulation of one takes a second or two. So a
few are simulated first, on tensor-parallel ranks alone: one for each number of them and each way to recompute. What
these take, by layers and samples, gives a quick account of all others (`Quick`). The best by that account are then
simulated as they are, and these figures count.
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
"""What keeps something off the device must be faster by this share: so far off may a plan be, and the host has a part
in it that other programs may want too."""
_MARGIN = 1.1
"""The quick account may be this far off; what it finds too large by more is not looked at again."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One way to spread the run."""

    candidate: Candidate
    config: RunConfig | None
    reason: str
    """Why not; empty for a way that works."""
    quick: Quick | None = None
    plan: Plan | None = None
    """Where it was simulated."""

    @property
    def tokens_per_second(self) -> float:
        """As predicted; estimated where it was not simulated."""
        if self.plan is not None:
            return self.plan.tokens_per_second
        return 0.0 if self.quick is None else self.quick.tokens_per_second

    @property
    def score(self) -> float:
        """By what ways are ordered: tokens per second, and of those that are about equal the simpler first."""
        return self.tokens_per_second * (1.0 - _AWAY * _tiers(self.config))


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has found, best first: those that were simulated and fit, then the others."""

    results: tuple[SearchResult, ...]
    seconds: float

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
    """Look at every way to spread a run, and closely at the `close` best, for about so many seconds."""
    start = time.monotonic()
    space = space or Space(ranks, useful_dimensions(hardware.kind, ("zero", "layout", "recompute", "micro", "offload")))
    legal, refused = _legal(candidates(config, space), config, ranks)
    log(f"{len(legal)} combinations of settings, {len(refused)} more are invalid")
    looked = estimate_all(legal, hardware, ranks, make_example)
    promising, large = [], []
    for result, quick in zip(legal, looked, strict=True):
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
    """Those that make a run, one of each that would be the same, and those that do not, with the reason."""
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
    """How many steps away from the device a run keeps something: host memory, files, the weights too."""
    if config is None:
        return 0
    offload = config.strategy.offload
    return offload.on + (offload.optimizer == "nvme") + (offload.params != "none")


def _with_share(result: SearchResult, share: float) -> SearchResult:
    """A way with a number for `ratio: auto`."""
    assert result.config is not None
    if result.config.strategy.offload.ratio != "auto":
        return result
    candidate = Candidate({**result.candidate.settings, SHARE: share})
    return replace(result, candidate=candidate, config=with_share(result.config, share))


def _same(config: RunConfig, ranks: int) -> str:
    """Equal for two runs that do the same: with one copy of the model, every ZeRO stage is the same."""
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
    """Candidates as the quick account expects them to be: fastest first, then those that are too large."""
    legal, _ = _legal(proposals, config, ranks)
    looked = estimate_all(legal, hardware, ranks, example_of)
    pairs = zip(legal, looked, strict=True)
    known = [(replace(result, quick=quick), quick) for result, quick in pairs if not isinstance(quick, str)]
    known.sort(key=lambda pair: (_too_large(pair[1], hardware), -pair[0].score))
    return [result.candidate for result, _ in known]
