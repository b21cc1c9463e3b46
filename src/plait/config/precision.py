"""`precision`: the dtypes of computation, gradient reduction and storage."""

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
    """Steps without overflow after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows tolerated before the scale halves."""
    consecutive_hysteresis: bool = False
    """Reset the hysteresis after every step without overflow, not only when the scale grows."""
    minimum: PositiveFloat = 1.0


class Fp8Config(Shorthand):
    """fp8 matrix products for the linear layers of a model's blocks; everything else stays in bf16."""

    builds = "plait.precision.fp8:apply_fp8"

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """One scale per tensor, or one per row: slower, and closer to bf16."""
    modules: Many[str] = ("*",)
    """Patterns of the layers' names."""
    skip: Many[str] = ()
    """Patterns of names to leave in bf16."""
    scales: Literal["now", "earlier"] = "now"
    """How a tensor is scaled: by its own maximum, or by those of earlier steps (delayed scaling), which saves one
    read of the tensor."""
    history: PositiveInt = 16
    """With `scales: earlier`: steps whose maxima count. Until there are that many, a tensor is scaled
    by its own maximum."""
    headroom: Annotated[float, Field(ge=1.0)] = 2.0
    """With `scales: earlier`: how many times larger than these maxima a number may be before it is clipped."""
    head: bool = False
    """Also use fp8 for the two backward products of a language model's head. Its logits and the loss do not change."""
    emulate: bool = False
    """Round to fp8 and multiply in fp32, for devices without fp8 products. Slow."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `recipe`; `true` and `false` are `tensorwise` and `none`."""
        if isinstance(value, bool):
            return {"recipe": "tensorwise" if value else "none"}
        if isinstance(value, dict) and value:
            return {"recipe": "tensorwise", **value}
        return {"recipe": value} if isinstance(value, str) else value


class CustomPrecisionRecipe(CustomPart):
    """A custom recipe, which replaces layers of a model by others that compute in other dtypes."""

    plugin_kind = "precision"


class PrecisionConfig(Shorthand):
    """Parameters and activations in `compute`, gradients summed in `reduce`, optimizer in fp32 if `master`."""

    compute: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    master: bool = True
    """Keep fp32 weights for the optimizer. Without them the weights themselves are in `compute`."""
    autocast: bool = True
    """Compute operations that need it (softmax, losses, norms) in fp32."""
    cast_inputs: bool = True
    """Cast floating-point inputs to `compute`."""
    scaler: ScalerConfig = Field(default_factory=ScalerConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    """fp8 matrix products. Setting it makes bf16 the default of `compute`."""
    recipe: CustomPrecisionRecipe | None = None
    """`package.module:name` of a function that replaces layers by others that compute in other dtypes; their parameters
    do not change."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is `compute`; `fp8` is bf16 with `fp8: tensorwise`."""
        if value == "fp8":
            value = {"fp8": "tensorwise"}
        if isinstance(value, dict) and value.get("fp8"):
            return {"compute": "bf16", **value}
        return {"compute": value} if isinstance(value, str) else value
