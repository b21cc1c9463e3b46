"""How a search is made. Not a section of the run description.

[Note: why a search is no section of a run]
A run description says what is trained, is stored in every checkpoint, and has no key that a run ignores. A search is
about many runs, ends with a run description of its own (`best.yaml`), and is over before that run starts. So it is
given beside the file, as options of `plait tune` or as a file of its own (`--search search.yaml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, model_validator

from plait.config import Many, NonNegativeInt, PositiveInt, Section, explain_section
from plait.errors import ConfigError

Dimension = Literal["zero", "layout", "recompute", "compile", "offload", "micro"]


class TuneConfig(Section):
    """What is searched, how, and for how long."""

    tuner: Literal["grid", "random", "model"] = "model"
    """The order of trials: as they come, shuffled, or what is expected to be fastest first."""
    trials: PositiveInt = 20
    """Measured at most; settings that are refused before anything starts do not count."""
    minutes: PositiveFloat | None = None
    """For the whole search. A trial that runs when they are over is cut off and not recorded."""
    trial_seconds: PositiveFloat = 600.0
    """For each trial; one that takes longer is recorded as such."""
    steps: PositiveInt = 10
    """Of each trial."""
    warmup: NonNegativeInt = 3
    """The first steps of a trial, which are not measured."""
    nproc: PositiveInt = 1
    """Processes of each trial."""
    metric: Literal["throughput", "tokens_per_s", "samples_per_s", "step_time"] = "throughput"
    """`throughput`: tokens a second, or samples where the data are not tokens."""
    early_stop: PositiveInt | None = None
    """End after so many measured trials in a row without a better one."""
    seed: NonNegativeInt = 0
    """Of the shuffling."""
    dimensions: Many[Dimension] | None = None
    """What is varied besides `space`; the global batch stays what it is. Absent: all that can pay on this machine."""
    micro_min: PositiveInt = 1
    """Smallest micro-batch that is tried."""
    micro_max: PositiveInt = 1024
    """Largest micro-batch that is tried."""
    micro_count: PositiveInt = 4
    """Micro-batch sizes tried at most for each of the other settings."""
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
    """A `TuneConfig`; what is wrong with the settings is a `ConfigError` with every problem."""
    try:
        return TuneConfig.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(explain_section(error, TuneConfig, "search", origin)) from None
