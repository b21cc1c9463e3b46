"""`precision`: the number formats of compute, reduction and storage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from plait.config.base import Many, NonNegativeInt, PositiveInt, Section, Shorthand
from plait.config.part import CustomPart


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


class Fp8Config(Shorthand):
    """Matrix products in 8 bits, for the linear layers of a model's blocks; everything else stays in bf16."""

    builds = "plait.precision.fp8:apply_fp8"

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """One scale for a tensor, or one for each row: slower, and closer to bf16."""
    modules: Many[str] = ("*",)
    """Patterns of the layers' names."""
    skip: Many[str] = ()
    """Patterns of names to leave in bf16."""
    scales: Literal["now", "earlier"] = "now"
    """Where a tensor's scale comes from: its own numbers, or those of earlier steps, which spares a reading of it."""
    history: PositiveInt = 16
    """Steps whose largest numbers `scales: earlier` looks at. As many steps, the first ones, find scales at once."""
    headroom: Annotated[float, Field(ge=1.0)] = 2.0
    """How many times larger than those a number may be, with `scales: earlier`, before it is cut."""
    head: bool = False
    """Also the two backward products of a language model's head. Its logits, and so the loss, stay as they are."""
    emulate: bool = False
    """Round in the same way and multiply in fp32: for devices without such products. Slow."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `recipe`; `true` and `false` are `tensorwise` and `none`."""
        if isinstance(value, bool):
            return {"recipe": "tensorwise" if value else "none"}
        if isinstance(value, dict) and value:
            return {"recipe": "tensorwise", **value}
        return {"recipe": value} if isinstance(value, str) else value


class CustomPrecisionRecipe(CustomPart):
    """A recipe of one's own, which exchanges layers of a model for others that compute in other formats."""

    plugin_kind = "precision"


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
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    """Matrix products in 8 bits. Naming it is asking for bf16 as `compute`."""
    recipe: CustomPrecisionRecipe | None = None
    """`package.module:name` of what exchanges layers for others that compute in other formats; their parameters stay
    as they are."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the format of `compute`; `fp8` is bf16 with `fp8: tensorwise`."""
        if value == "fp8":
            value = {"fp8": "tensorwise"}
        if isinstance(value, dict) and value.get("fp8"):
            return {"compute": "bf16", **value}
        return {"compute": value} if isinstance(value, str) else value
