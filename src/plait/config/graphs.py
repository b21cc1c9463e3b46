"""Whether forward and backward pass are recorded (`strategy.graphs`): what stands against it, and who decides."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.online import ONLINE
from plait.config.run import RunConfig
from plait.errors import ConfigError, Problem

REPEATING = ("gpt", "llama", "resnet")
"""Described models whose Python does the same in every step. `auto` records no others."""


def against_recording(config: RunConfig) -> Iterator[str]:
    """What a recording cannot go with: it does what it did the first time, on the device alone."""
    strategy, fp8 = config.strategy, config.precision.fp8
    if strategy.engine != "native":
        yield f"cannot go with engine {strategy.engine_name}, which has passes of its own"
    if strategy.offload.on or strategy.offload.activations != "none":
        yield "cannot go with `strategy.offload`: the host has a part in every pass"
    if strategy.recompute.mode != "none" or strategy.tiles.names:
        yield (
            "cannot go with `strategy.recompute` or `strategy.tiles`: torch keeps the random state of what is computed "
            "again, which it cannot while it records"
        )
    if fp8.recipe != "none" and fp8.scales == "earlier":
        yield "cannot go with `precision.fp8.scales: earlier`, whose scales are others in every step"
    if strategy.compile.mode in ("reduce-overhead", "max-autotune"):
        yield f"cannot go with `strategy.compile.mode: {strategy.compile.mode}`, which records by itself"
    if config.phase in ONLINE:
        yield f"cannot go with phase {config.phase}, whose loop calls the model by itself"
    if config.profile:
        yield "leaves `profile` nothing to look at: a recording has no operators and no modules"


def check_graphs(config: RunConfig, *, ranks: int, accumulation: int, whole_steps: bool = True) -> None:
    """Refuse to record what is no step of one process and one micro-batch; `whole_steps`: who trains asks for such."""
    if config.strategy.graphs is not True:
        return
    if ranks > 1:
        _refuse(f"records the passes of one process, and there are {ranks}", "Start one process")
    if accumulation > 1:
        message = f"records steps of one micro-batch, and a step has {accumulation}: a pass would have to add to others"
        _refuse(message, "Write `batch.accumulation: 1`")
    if not whole_steps:
        _refuse("records both passes of a step as one, and this loop asks for them one by one", "Train with a Runner")


def may_record(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> bool:
    """Whether a step could be recorded that nobody asked to: `auto` does it where the device waits for Python.

    `described`: the model is the one of `config.model`, and not an object of the user's.
    """
    return (
        config.strategy.graphs == "auto"
        and described
        and config.model is not None
        and config.model.type in REPEATING
        and config.train.loss is None
        and config.phase is None
        and not config.deterministic  # when a recording begins is a matter of time
        and ranks == accumulation == 1
        and not any(against_recording(config))
    )


def with_graphs_decided(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> RunConfig:
    """The same with `true` or `false` in place of `auto`, for a plan: recorded, or the device does not wait."""
    if config.strategy.graphs != "auto":
        return config
    records = may_record(config, ranks=ranks, accumulation=accumulation, described=described)
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"graphs": records})})


def _refuse(message: str, remedy: str) -> None:
    raise ConfigError(Problem("strategy.graphs", f"true {message}", f"{remedy}, or leave it out."))
