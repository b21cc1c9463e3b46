"""`schedule`: the learning rate over time. Lengths are in steps or epochs, as set by `by`.

DeepSpeed's schedules are here and not in its front end: `schedule: {type: WarmupLR}` is valid in every run description,
and the schema must know all types before any front end is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag

from plait.config.base import Many, NonNegativeInt, PositiveInt, Section
from plait.config.optim import Fraction
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, builtin_or_custom


class _Schedule(Section):
    by: Literal["step", "epoch"] = "step"
    """The unit of every length below."""
    warmup: NonNegativeInt = 0
    """Length of the warm-up from `warmup_start_factor` to the full rate, before the schedule itself."""
    warmup_start_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class ConstantConfig(_Schedule):
    """`factor` of the rate for `total` units, then the rate itself."""

    builds = "plait.optim.schedule:constant"

    type: Literal["ConstantLR"] = "ConstantLR"
    factor: PositiveFloat = 1.0
    total: NonNegativeInt | None = None
    """Absent: to the end of the run."""


class LinearConfig(_Schedule):
    """A straight line from `start_factor` to `end_factor` over `total` units."""

    builds = "plait.optim.schedule:linear"

    type: Literal["LinearLR"] = "LinearLR"
    start_factor: NonNegativeFloat = 1.0
    end_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None
    """Absent: to the end of the run."""


class CosineConfig(_Schedule):
    """Half a cosine down to `min_factor`."""

    builds = "plait.optim.schedule:cosine"

    type: Literal["CosineAnnealingLR"] = "CosineAnnealingLR"
    min_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None


class CosineRestartConfig(_Schedule):
    """Cosine annealing with restarts, each cycle `multiply` times longer than the one before."""

    builds = "plait.optim.schedule:cosine_restart"

    type: Literal["CosineAnnealingWarmRestarts"] = "CosineAnnealingWarmRestarts"
    first: PositiveInt
    multiply: PositiveInt = 1
    min_factor: NonNegativeFloat = 0.0


class PolynomialConfig(_Schedule):
    """A polynomial down to `min_factor`."""

    builds = "plait.optim.schedule:polynomial"

    type: Literal["PolynomialLR"] = "PolynomialLR"
    power: PositiveFloat = 1.0
    min_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None


class MultiStepConfig(_Schedule):
    """Multiplied by `gamma` at each milestone."""

    builds = "plait.optim.schedule:multi_step"

    type: Literal["MultiStepLR"] = "MultiStepLR"
    milestones: Many[PositiveInt]
    gamma: PositiveFloat = 0.1


class ExponentialConfig(_Schedule):
    """Multiplied by `gamma` each unit."""

    builds = "plait.optim.schedule:exponential"

    type: Literal["ExponentialLR"] = "ExponentialLR"
    gamma: PositiveFloat = 0.99


class WSDConfig(_Schedule):
    """Warm-up, stable, decay: the full rate until `decay` units before the end, then decay to `min_factor`."""

    builds = "plait.optim.schedule:wsd"

    type: Literal["WSD"] = "WSD"
    decay: PositiveInt
    """Length of the decay."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay; `sqrt`: one minus the square root of its progress."""
    min_factor: NonNegativeFloat = 0.0
    total: PositiveInt | None = None
    """Where the decay ends. Absent: the end of the run."""


class CustomSchedule(CustomPart):
    """A custom schedule: a function of the step, a class whose objects are such functions, or a scheduler of torch.

    Other schedulers of torch than those above may be given by name, short for `torch.optim.lr_scheduler:Name`.
    """

    plugin_kind = "schedule"
    builtin = (
        "ConstantLR",
        "LinearLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "PolynomialLR",
        "MultiStepLR",
        "ExponentialLR",
        "WSD",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    )
    aliases: ClassVar[Mapping[str, str]] = {
        name: f"torch.optim.lr_scheduler:{name}" for name in ("CyclicLR", "OneCycleLR", "ReduceLROnPlateau", "StepLR")
    }

    by: Literal["step", "epoch"] = "step"
    """What it counts: steps or epochs."""


class _DeepSpeedSchedule(Section):
    by: Literal["step", "epoch"] = "step"


class WarmupConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupLR: up to `warmup_max_lr`, then flat."""

    builds = "plait.frontends.deepspeed.schedules:warmup"

    type: Literal["WarmupLR"] = "WarmupLR"
    warmup_min_lr: NonNegativeFloat = 0.0
    warmup_max_lr: PositiveFloat | None = None
    """Absent: `optim.lr`."""
    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupDecayConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupDecayLR: up, then linearly down to zero at `total_num_steps`."""

    builds = "plait.frontends.deepspeed.schedules:warmup_decay"

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    total_num_steps: PositiveInt | None = None
    warmup_min_lr: NonNegativeFloat = 0.0
    warmup_max_lr: PositiveFloat | None = None
    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupCosineConfig(_DeepSpeedSchedule):
    """DeepSpeed's WarmupCosineLR: ratios of the optimizer's learning rate."""

    builds = "plait.frontends.deepspeed.schedules:warmup_cosine"

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    total_num_steps: PositiveInt | None = None
    warmup_min_ratio: NonNegativeFloat = 0.0
    warmup_num_steps: PositiveInt = 1000
    cos_min_ratio: NonNegativeFloat = 1e-4
    warmup_type: Literal["log", "linear"] = "log"


class OneCycleConfig(_DeepSpeedSchedule):
    """DeepSpeed's OneCycle: one cycle of the learning rate (optionally of the momentum), then decay."""

    builds = "plait.frontends.deepspeed.schedules:one_cycle"

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
    """DeepSpeed's LRRangeTest: the learning rate rises, to find where training diverges."""

    builds = "plait.frontends.deepspeed.schedules:range_test"

    type: Literal["LRRangeTest"] = "LRRangeTest"
    lr_range_test_min_lr: PositiveFloat = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: PositiveFloat = 1.0
    lr_range_test_staircase: bool = False


ScheduleConfig = Annotated[
    Annotated[
        Annotated[
            ConstantConfig
            | LinearConfig
            | CosineConfig
            | CosineRestartConfig
            | PolynomialConfig
            | MultiStepConfig
            | ExponentialConfig
            | WSDConfig
            | WarmupConfig
            | WarmupDecayConfig
            | WarmupCosineConfig
            | OneCycleConfig
            | LRRangeTestConfig,
            Field(discriminator="type"),
        ],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomSchedule, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomSchedule)),
]
