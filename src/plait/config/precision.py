"""`precision`: the number formats of compute, reduction and storage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat

from plait.config.base import NonNegativeInt, PositiveInt, Section, Shorthand


class ScalerConfig(Section):
    """Loss scaling for fp16: dynamic, unless `static` is set."""

    static: PositiveFloat | None = None
    initial_power: NonNegativeInt = 16
    """The first scale is 2 to this power."""
    window: PositiveInt = 1000
    """Clean steps after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows tolerated before the scale halves."""
    consecutive_hysteresis: bool = False
    """Refill the tolerance after every clean step, not only when the scale grows."""
    minimum: PositiveFloat = 1.0


class PrecisionConfig(Shorthand):
    """Parameters and activations in `compute`, gradients summed in `reduce`, optimizer in fp32 if `master`."""

    compute: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    master: bool = True
    """Keep fp32 weights for the optimizer. Without them the weights themselves are in `compute`."""
    autocast: bool = True
    """Operations that need fp32 (softmax, losses, norms) get it."""
    cast_inputs: bool = True
    """Floating-point inputs are cast to `compute`."""
    scaler: ScalerConfig = Field(default_factory=ScalerConfig)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the format of `compute`."""
        return {"compute": value} if isinstance(value, str) else value
