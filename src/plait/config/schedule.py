"""`schedule`: how the learning rate moves. Lengths are in steps or epochs, as `by` says."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from plait.config.base import Many, NonNegativeInt, PositiveInt, Section
from plait.config.optim import Fraction


class _Schedule(Section):
    by: Literal["step", "epoch"] = "step"
    """What every length below counts."""
    warmup: NonNegativeInt = 0
    """Length of the rise from `warmup_start_factor` to the full rate, before the schedule proper."""
    warmup_start_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class ConstantConfig(_Schedule):
    """`factor` of the rate for `total` units, then the rate itself."""

    type: Literal["ConstantLR"] = "ConstantLR"
    factor: PositiveFloat = 1.0
    total: NonNegativeInt | None = None
    """Absent: to the end of the run."""


class LinearConfig(_Schedule):
    """A straight line from `start_factor` to `end_factor` over `total` units."""

    type: Literal["LinearLR"] = "LinearLR"
    start_factor: NonNegativeFloat = 1.0
    end_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None
    """Absent: to the end of the run."""


class CosineConfig(_Schedule):
    """Half a cosine down to `min_factor`."""

    type: Literal["CosineAnnealingLR"] = "CosineAnnealingLR"
    min_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None


class CosineRestartConfig(_Schedule):
    """Cosines that start again, each `multiply` times longer than the one before."""

    type: Literal["CosineAnnealingWarmRestarts"] = "CosineAnnealingWarmRestarts"
    first: PositiveInt
    multiply: PositiveInt = 1
    min_factor: NonNegativeFloat = 0.0


class PolynomialConfig(_Schedule):
    """A polynomial down to `min_factor`."""

    type: Literal["PolynomialLR"] = "PolynomialLR"
    power: PositiveFloat = 1.0
    min_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None


class MultiStepConfig(_Schedule):
    """Multiplied by `gamma` at each milestone."""

    type: Literal["MultiStepLR"] = "MultiStepLR"
    milestones: Many[PositiveInt]
    gamma: PositiveFloat = 0.1


class ExponentialConfig(_Schedule):
    """Multiplied by `gamma` each unit."""

    type: Literal["ExponentialLR"] = "ExponentialLR"
    gamma: PositiveFloat = 0.99


class _DeepSpeedSchedule(Section):
    by: Literal["step", "epoch"] = "step"


class WarmupConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupLR: up to `warmup_max_lr`, then flat."""

    type: Literal["WarmupLR"] = "WarmupLR"
    warmup_min_lr: NonNegativeFloat = 0.0
    warmup_max_lr: PositiveFloat | None = None
    """Absent: `optim.lr`."""
    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupDecayConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupDecayLR: up, then linearly down to zero at `total_num_steps`."""

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    total_num_steps: PositiveInt | None = None
    warmup_min_lr: NonNegativeFloat = 0.0
    warmup_max_lr: PositiveFloat | None = None
    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupCosineConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupCosineLR: ratios of the optimizer's own rate."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    total_num_steps: PositiveInt | None = None
    warmup_min_ratio: NonNegativeFloat = 0.0
    warmup_num_steps: PositiveInt = 1000
    cos_min_ratio: NonNegativeFloat = 1e-4
    warmup_type: Literal["log", "linear"] = "log"


class OneCycleConfig(_DeepSpeedSchedule):
    """DeepSpeed's OneCycle: a rate cycle (momentum cycle if asked), then decay."""

    type: Literal["OneCycle"] = "OneCycle"
    cycle_min_lr: NonNegativeFloat
    cycle_max_lr: PositiveFloat
    decay_lr_rate: NonNegativeFloat = 0.0
    cycle_first_step_size: PositiveInt = 2000
    cycle_second_step_size: PositiveInt | None = None
    cycle_first_stair_count: NonNegativeInt = 0
    cycle_second_stair_count: NonNegativeInt | None = None
    decay_step_size: NonNegativeInt = 0
    cycle_momentum: bool = False
    cycle_min_mom: Fraction = 0.8
    cycle_max_mom: Fraction = 0.9
    decay_mom_rate: NonNegativeFloat = 0.0


class LRRangeTestConfig(_DeepSpeedSchedule):
    """DeepSpeed's LRRangeTest: the rate climbs, to find where training breaks."""

    type: Literal["LRRangeTest"] = "LRRangeTest"
    lr_range_test_min_lr: PositiveFloat = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: PositiveFloat = 1.0
    lr_range_test_staircase: bool = False


ScheduleConfig = Annotated[
    ConstantConfig
    | LinearConfig
    | CosineConfig
    | CosineRestartConfig
    | PolynomialConfig
    | MultiStepConfig
    | ExponentialConfig
    | WarmupConfig
    | WarmupDecayConfig
    | WarmupCosineConfig
    | OneCycleConfig
    | LRRangeTestConfig,
    Field(discriminator="type"),
]
