"""The settings of a search, and the order of its trials.

[Note: a search is not a section of a run]
A run description says what is trained, is stored in every checkpoint, and has no key that a run ignores. A search
starts many runs, writes another run description (`best.yaml`), and ends before that run starts. So its settings are
separate: options of `plait tune`, or a file (`--search search.yaml`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, model_validator

from plait.config import Many, NonNegativeInt, PositiveInt, RunConfig, Section, explain_section
from plait.errors import ConfigError
from plait.plan import Candidate, Space, useful_dimensions

Dimension = Literal["zero", "layout", "recompute", "compile", "offload", "micro"]


class TuneConfig(Section):
    """The settings of a search: what is varied, in which order, and for how long."""

    tuner: Literal["grid", "random", "model"] = "model"
    """The order of trials: as enumerated, shuffled, or what is expected to be fastest first."""
    trials: PositiveInt = 20
    """Most trials that are run; settings that are refused without a run do not count."""
    minutes: PositiveFloat | None = None
    """Time limit of the whole search. A trial that runs at its end is killed and not recorded."""
    trial_seconds: PositiveFloat = 600.0
    """Time limit of each trial; one that takes longer is recorded as a timeout."""
    steps: PositiveInt = 10
    """Steps of each trial."""
    warmup: NonNegativeInt = 3
    """The first steps of a trial, which are not measured."""
    nproc: PositiveInt = 1
    """Processes of each trial."""
    metric: Literal["throughput", "tokens_per_s", "samples_per_s", "step_time"] = "throughput"
    """`throughput`: tokens per second, or samples where the data are not tokens."""
    early_stop: PositiveInt | None = None
    """End after this number of trials in a row without a better one."""
    seed: NonNegativeInt = 0
    """The seed of shuffling."""
    dimensions: Many[Dimension] | None = None
    """What is varied besides `space`, at the same global batch. Absent: all that can be faster on this machine."""
    micro_min: PositiveInt = 1
    """Smallest micro-batch that is tried."""
    micro_max: PositiveInt = 1024
    """Largest micro-batch that is tried."""
    micro_count: PositiveInt = 4
    """Most micro-batch sizes that are tried for each of the other settings."""
    space: dict[str, Many[Any]] = Field(default_factory=dict)
    """Dotted keys of the run description, and the values to try. A key here is not varied by a dimension."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> TuneConfig:
        if self.warmup >= self.steps:
            raise ValueError(f"`warmup` is {self.warmup} of {self.steps} `steps`: nothing would be measured")
        if self.micro_min > self.micro_max:
            raise ValueError(f"`micro_min` is {self.micro_min}, above `micro_max`, {self.micro_max}")
        empty = [key for key, values in self.space.items() if not values]
        if empty:
            raise ValueError(f"`space` has no value to try for {', '.join(empty)}")
        return self


def make_tune_config(settings: Mapping[str, Any], *, origin: str = "") -> TuneConfig:
    """Return a `TuneConfig`; raise a `ConfigError` with all problems. `origin` names the settings' file."""
    try:
        return TuneConfig.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(explain_section(error, TuneConfig, "search", origin)) from None


# The candidates, and their order.


RankCandidates = Callable[[RunConfig, Sequence[Candidate]], Sequence[Candidate]]
"""A function that returns candidates, those expected to be fastest first. Those it leaves out are tried last."""

_OFFLOAD_KEYS = ("optimizer", "params")
_OFFLOAD_COST = {"none": 0, "cpu": 1, "nvme": 2}
_RECOMPUTE_COST = {"none": 0, "every": 1, "selective": 1, "auto": 1, "full": 2}


def space_of(run: RunConfig, tune: TuneConfig) -> Space:
    """Return the space to search: as configured, or all that can be faster here; without compile where unsupported."""
    device = _device_type(run)
    dimensions = useful_dimensions(device) if tune.dimensions is None else tune.dimensions
    return Space(
        tune.nproc,
        tuple(dimension for dimension in dimensions if dimension != "compile" or _can_compile(device)),
        tune.space,
        tune.micro_min,
        tune.micro_max,
        tune.micro_count,
    )


def _device_type(run: RunConfig) -> str:
    """Return the type of the device that trials run on."""
    import torch

    return "cuda" if run.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"


def _can_compile(device: str) -> bool:
    import torch

    from plait.config import CompileConfig
    from plait.distributed import reason_not_to_compile

    return reason_not_to_compile(CompileConfig(), torch.device(device)) is None


def in_order(
    run: RunConfig, candidates: Sequence[Candidate], tune: TuneConfig, rank: RankCandidates
) -> list[Candidate]:
    """Return the unchanged run first, to compare with; then the others in the order of the tuner."""
    first = [candidate for candidate in candidates if not candidate.settings]
    rest = [candidate for candidate in candidates if candidate.settings]
    if tune.tuner == "random":
        random.Random(tune.seed).shuffle(rest)  # noqa: S311  # reproducible, not a secret
    elif tune.tuner == "model":
        ranked = list(rank(run, rest))
        known = {candidate.key for candidate in ranked}
        rest = [*ranked, *(candidate for candidate in rest if candidate.key not in known)]
    return [*first, *rest]


def rank_by_rule(run: RunConfig, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates ordered by offload, recompute, sharding, micro-batch size and stage, without simulation."""

    def cost(candidate: Candidate) -> tuple[float, ...]:
        settings, strategy = candidate.settings, run.strategy
        targets = [settings.get(f"strategy.offload.{key}", getattr(strategy.offload, key)) for key in _OFFLOAD_KEYS]
        cut = [settings.get(f"strategy.layout.{axis}", getattr(strategy.layout, axis)) for axis in ("tp", "pp")]
        recompute = settings.get("strategy.recompute.mode", strategy.recompute.mode)
        micro = settings.get("batch.micro") or run.batch.micro or 1
        return (
            float(sum(_OFFLOAD_COST.get(str(target), 0) for target in targets)),
            _RECOMPUTE_COST.get(str(recompute), 1),
            float(cut[0] * cut[1]),
            -float(micro),
            float(settings.get("strategy.zero", strategy.stage) or 0),
        )

    return sorted(candidates, key=cost)
