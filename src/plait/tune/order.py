"""What is tried, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from plait.config import RunConfig
from plait.plan import Candidate, Space, that_can_pay
from plait.tune.config import TuneConfig

Rank = Callable[[RunConfig, Sequence[Candidate]], Sequence[Candidate]]
"""Candidates in the order in which they are expected to be fast. One that is left out is tried last."""

_HOMES = ("optimizer", "params")
_FAR = {"none": 0, "cpu": 1, "nvme": 2}
_RECOMPUTE_COST = {"none": 0, "every": 1, "selective": 1, "auto": 1, "full": 2}


def space_of(run: RunConfig, tune: TuneConfig) -> Space:
    """What is varied: as asked, or all that can pay here; without compiling where that cannot work."""
    kind = _kind(run)
    dimensions = that_can_pay(kind) if tune.dimensions is None else tune.dimensions
    return Space(
        tune.nproc,
        tuple(each for each in dimensions if each != "compile" or _can_compile(kind)),
        tune.space,
        tune.micro_min,
        tune.micro_max,
        tune.micro_count,
    )


def _kind(run: RunConfig) -> str:
    """The device that trials run on."""
    import torch

    return "cuda" if run.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"


def _can_compile(kind: str) -> bool:
    import torch

    from plait.config import CompileConfig
    from plait.parallel import why_not

    return why_not(CompileConfig(), torch.device(kind)) is None


def in_order(run: RunConfig, found: Sequence[Candidate], tune: TuneConfig, rank: Rank) -> list[Candidate]:
    """The run as it is written first, to compare with; then as the tuner says."""
    first, rest = [each for each in found if not each.settings], [each for each in found if each.settings]
    if tune.tuner == "random":
        random.Random(tune.seed).shuffle(rest)  # noqa: S311  # an order that comes again, and no secret
    elif tune.tuner == "model":
        ranked = list(rank(run, rest))
        known = {each.key for each in ranked}
        rest = [*ranked, *(each for each in rest if each.key not in known)]
    return [*first, *rest]


def rank_by_rule(run: RunConfig, found: Sequence[Candidate]) -> list[Candidate]:
    """What costs nothing to know: all on the device, little recomputing, few cuts, large micro-batches, low stages."""

    def cost(candidate: Candidate) -> tuple[float, ...]:
        settings, strategy = candidate.settings, run.strategy
        homes = [settings.get(f"strategy.offload.{key}", getattr(strategy.offload, key)) for key in _HOMES]
        cut = [settings.get(f"strategy.layout.{axis}", getattr(strategy.layout, axis)) for axis in ("tp", "pp")]
        recompute = settings.get("strategy.recompute.mode", strategy.recompute.mode)
        micro = settings.get("batch.micro") or run.batch.micro or 1
        return (
            float(sum(_FAR.get(str(home), 0) for home in homes)),
            _RECOMPUTE_COST.get(str(recompute), 1),
            float(cut[0] * cut[1]),
            -float(micro),
            float(settings.get("strategy.zero", strategy.stage) or 0),
        )

    return sorted(found, key=cost)
