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
from plait.plan.quick import Quick, quick_look
from plait.plan.shares import SHARE, with_share
from plait.plan.simulate import MakeExample, example_of
from plait.plan.space import Candidate, Space, candidates, that_can_pay

_AWAY = 0.03
"""What keeps something off the device must be faster by this share: so far off may a plan be, and the host has a part
in it that other programs may want too."""
_MARGIN = 1.1
"""The quick account may be this far off; what it finds too large by more is not looked at again."""


@dataclass(frozen=True, slots=True)
class Found:
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
        """As predicted; by the quick account where there is no better one."""
        if self.plan is not None:
            return self.plan.tokens_per_second
        return 0.0 if self.quick is None else self.quick.tokens_per_second

    @property
    def worth(self) -> float:
        """By what ways are ordered: tokens per second, and of those that are about equal the simpler first."""
        return self.tokens_per_second * (1.0 - _AWAY * _tiers(self.config))


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has found, best first: those that were simulated and fit, then the others."""

    found: tuple[Found, ...]
    seconds: float

    @property
    def best(self) -> Found | None:
        """The fastest that fits, by its `worth`; None where nothing does."""
        return next((each for each in self.found if each.plan is not None and not each.reason), None)


def search(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    close: int = 8,
    seconds: float = 50.0,
    space: Space | None = None,
    make_example: MakeExample = example_of,
    say: Callable[[str], None] = lambda text: None,
) -> Search:
    """Look at every way to spread a run, and closely at the `close` best, for about so many seconds."""
    start = time.monotonic()
    space = space or Space(ranks, that_can_pay(hardware.kind, ("zero", "layout", "recompute", "micro", "offload")))
    legal, refused = _legal(candidates(config, space), config, ranks)
    say(f"{len(legal)} ways to spread the run, {len(refused)} more that no run can have")
    looked = quick_look(legal, hardware, ranks, make_example)
    promising, large = [], []
    for each, quick in zip(legal, looked, strict=True):
        if isinstance(quick, str):
            refused.append(replace(each, reason=quick))
        elif quick.needed_gib > hardware.memory_gib * _MARGIN:
            reason = f"needs about {quick.needed_gib:.0f} GiB of {hardware.memory_gib:.0f}"
            large.append(replace(each, quick=quick, reason=reason))
        elif quick.host_gib > hardware.host_memory_gib * _MARGIN:
            reason = f"needs about {quick.host_gib:.0f} GiB of the host's {hardware.host_memory_gib:.0f}"
            large.append(replace(each, quick=quick, reason=reason))
        else:
            promising.append(_with_share(replace(each, quick=quick), quick.share))
    promising.sort(key=lambda each: -each.worth)
    simulated: list[Found] = []
    late = False
    for index, each in enumerate(promising):
        fitting = sum(not one.reason for one in simulated)
        late = bool(fitting) and time.monotonic() - start > seconds
        if fitting >= close or late:
            promising = promising[index:]
            break
        simulated.append(_simulated(each, hardware, ranks, make_example))
    else:
        promising = []
    fits = sorted((each for each in simulated if not each.reason), key=lambda each: -each.worth)
    fails = [each for each in simulated if each.reason]
    why = "not simulated: the search's time was up" if late else "not simulated: behind by the quick account"
    rest = [replace(each, reason=why) for each in promising]
    return Search((*fits, *rest, *fails, *large, *refused), time.monotonic() - start)


def _legal(found: Sequence[Candidate], run: RunConfig, ranks: int) -> tuple[list[Found], list[Found]]:
    """Those that make a run, one of each that would be the same, and those that do not, with the reason."""
    legal, refused = [], []
    seen: set[str] = set()
    for candidate in found:
        try:
            config = candidate.applied_to(run)
            key = _same(config, ranks)
        except ConfigError as error:
            refused.append(Found(candidate, None, in_one_line(error)))
            continue
        if key not in seen:
            seen.add(key)
            legal.append(Found(candidate, config, ""))
    return legal, refused


def _tiers(config: RunConfig | None) -> int:
    """How many steps away from the device a run keeps something: host memory, files, the weights too."""
    if config is None:
        return 0
    offload = config.strategy.offload
    return offload.on + (offload.optimizer == "nvme") + (offload.params != "none")


def _with_share(found: Found, share: float) -> Found:
    """A way with a number for `ratio: auto`."""
    assert found.config is not None
    if found.config.strategy.offload.ratio != "auto":
        return found
    candidate = Candidate({**found.candidate.settings, SHARE: share})
    return replace(found, candidate=candidate, config=with_share(found.config, share))


def _same(config: RunConfig, ranks: int) -> str:
    """Equal for two runs that do the same: with one copy of the model, every ZeRO stage is the same."""
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    data: dict[str, Any] = config.model_dump(mode="json", include={"strategy", "batch"})
    data["strategy"] |= {"zero": config.strategy.stage if layout.replicas > 1 else 0, "layout": layout.sizes()}
    data["strategy"]["sharding"] = None
    return json.dumps(data, sort_keys=True)


def _simulated(found: Found, hardware: Hardware, ranks: int, make_example: MakeExample) -> Found:
    assert found.config is not None
    try:
        plan = make_plan(found.config, hardware, ranks=ranks, make_example=make_example, detailed=False)
    except PlaitError as error:
        return replace(found, reason=in_one_line(error))
    reason = ""
    if plan.needed_gib > hardware.memory_gib:
        phase, peak = plan.fullest.account.peak
        reason = (
            f"needs {plan.needed_gib:.1f} GiB of {hardware.memory_gib:.1f}: "
            f"{peak / GIB:.1f} in the {phase} phase of the {plan.fullest.name}"
        )
    elif plan.host_gib > hardware.host_memory_gib:
        least = f"needs {plan.host_gib:.0f} GiB of the host's {hardware.host_memory_gib:.0f}"
        reason = f"{least}, in the {plan.host_phase} phase"
    return replace(found, plan=plan, reason=reason)


def _too_large(quick: Quick, hardware: Hardware) -> bool:
    return quick.needed_gib > hardware.memory_gib or quick.host_gib > hardware.host_memory_gib


def in_expected_order(config: RunConfig, found: Sequence[Candidate], hardware: Hardware, ranks: int) -> list[Candidate]:
    """Candidates as the quick account expects them to be: fastest first, then those that are too large."""
    legal, _ = _legal(found, config, ranks)
    looked = quick_look(legal, hardware, ranks, example_of)
    pairs = zip(legal, looked, strict=True)
    known = [(replace(each, quick=quick), quick) for each, quick in pairs if not isinstance(quick, str)]
    known.sort(key=lambda pair: (_too_large(pair[1], hardware), -pair[0].worth))
    return [each.candidate for each, _ in known]
