"""Rules for `precision`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.rules.facts import Facts, idle
from plait.errors import Problem

_EARLIER = ("history", "headroom")
_DYNAMIC = ("initial_power", "window", "hysteresis", "consecutive_hysteresis", "minimum")


def scaler_needs_fp16(facts: Facts) -> Iterator[Problem]:
    """Only fp16 is so narrow that gradients must be scaled into it."""
    precision = facts.config.precision
    if precision.compute != "fp16":
        reason = f"the loss is scaled only in fp16, and `precision.compute` is {precision.compute}"
        remedy = "Leave it out, or write `precision.compute: fp16`."
        yield from idle("precision.scaler", precision.scaler, ("static", *_DYNAMIC), reason, remedy)


def static_scale_does_not_move(facts: Facts) -> Iterator[Problem]:
    """With a `static` scale there is nothing to grow or shrink."""
    precision = facts.config.precision
    if precision.compute == "fp16" and precision.scaler.static is not None:
        reason = f"`precision.scaler.static` fixes the scale at {precision.scaler.static:g}"
        yield from idle("precision.scaler", precision.scaler, _DYNAMIC, reason, "Leave one of the two out.")


def fp16_reduction_needs_fp16(facts: Facts) -> Iterator[Problem]:
    """Without a loss scale, sums in fp16 overflow or vanish."""
    precision = facts.config.precision
    if precision.reduce == "fp16" and precision.compute != "fp16":
        message = f"fp16 sums need the loss scale of fp16, but `precision.compute` is {precision.compute}"
        choice = "fp32" if precision.compute in ("fp32", "tf32") else "bf16` or `fp32"
        yield Problem("precision.reduce", message, f"Write `{choice}`.")


def master_weights_are_a_choice_in_half_precision(facts: Facts) -> Iterator[Problem]:
    """In fp32 the weights are their own master copy."""
    precision = facts.config.precision
    if not precision.master and precision.compute in ("fp32", "tf32"):
        message = f"false has no effect: with `precision.compute: {precision.compute}` the weights are fp32 themselves"
        yield Problem("precision.master", message, "Leave it out, or write `precision.compute: bf16`.")


def fp8_stands_on_bf16(facts: Facts) -> Iterator[Problem]:
    """What is not multiplied in 8 bits is computed in bf16, and layers must be whole to be scaled."""
    precision, strategy = facts.config.precision, facts.config.strategy
    if precision.fp8.recipe == "none":
        reason = "`precision.fp8.recipe` is none"
        names = ("modules", "skip", "scales", *_EARLIER, "head", "emulate")
        yield from idle("precision.fp8", precision.fp8, names, reason, "Leave it out.")
        return
    if precision.compute != "bf16":
        message = f"8-bit products stand beside bf16, but `precision.compute` is {precision.compute}"
        yield Problem("precision.fp8", message, "Write `precision.compute: bf16`.")
    if strategy.layout.tp > 1:
        message = "layers that are cut over `strategy.layout.tp` have no 8-bit form yet"
        yield Problem("precision.fp8", message, "Write `precision: bf16`, or `strategy.layout.tp: 1`.")


def earlier_scales_are_one_a_tensor(facts: Facts) -> Iterator[Problem]:
    """What is kept from step to step is one number a tensor, and kernels note it."""
    fp8, strategy = facts.config.precision.fp8, facts.config.strategy
    if fp8.recipe == "none":
        return
    if fp8.scales == "now":
        reason = "`precision.fp8.scales` is now"
        remedy = "Leave it out, or write `precision.fp8.scales: earlier`."
        yield from idle("precision.fp8", fp8, _EARLIER, reason, remedy)
        return
    if fp8.recipe == "rowwise":
        message = "only one number a tensor is kept from step to step, and `precision.fp8.recipe` is rowwise"
        yield Problem("precision.fp8.scales", message, "Leave it out, or write `precision.fp8.recipe: tensorwise`.")
    if strategy.compile.enabled:
        message = "compiled layers find their scales at once"
        yield Problem("precision.fp8.scales", message, "Leave out `strategy.compile`, or write `now`.")


def fp8_head_makes_the_loss(facts: Facts) -> Iterator[Problem]:
    """A head has a backward pass in 8 bits where it goes straight to the loss; where logits are wanted it does not."""
    config = facts.config
    if config.precision.fp8.head and config.phase not in (None, "sft"):
        message = f"true has no effect: phase {config.phase} computes its loss from logits"
        yield Problem("precision.fp8.head", message, "Leave it out.")


RULES = (
    scaler_needs_fp16,
    static_scale_does_not_move,
    fp16_reduction_needs_fp16,
    master_weights_are_a_choice_in_half_precision,
    fp8_stands_on_bf16,
    earlier_scales_are_one_a_tensor,
    fp8_head_makes_the_loss,
)
