"""`plait.prepare`: an engine for people who keep their own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from plait.config import (
    DeviceArgument,
    ModelArgument,
    OptimArgument,
    PrecisionArgument,
    ScheduleArgument,
    Section,
    StrategyArgument,
    check,
    parse_sections,
    refuse_unknown_keywords,
    resolve_batch,
)
from plait.errors import ConfigError, Problem
from plait.strategy.base import Engine
from plait.strategy.engines import prepare_engine
from plait.strategy.native.loss import LossFunction
from plait.strategy.preparation import Length, Preparation
from plait.world import World, open_world


@refuse_unknown_keywords
def prepare(
    model: nn.Module | Callable[[], nn.Module] | ModelArgument,
    *,
    optim: OptimArgument | None = None,
    strategy: StrategyArgument | None = None,
    precision: PrecisionArgument | None = None,
    schedule: ScheduleArgument | None = None,
    clip_norm: float | None = None,
    accumulation: int = 1,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
    loss_fn: LossFunction | None = None,
    model_inputs: int | Sequence[str] | None = None,
    example: Any = None,
    seed: int = 0,
    device: DeviceArgument = "auto",
    world: World | None = None,
) -> Engine:
    """Make a model ready for training; the sections are those of a run description.

    `model` is a module, or a function that makes one: where that can be built without memory, no rank ever
    holds more than its part. A section describes one: `plait.LlamaModel(…)`, `{"type": "llama", …}`, `"my:Net"`.

    `loss_fn(outputs, batch)` makes a loss of what the model returns. `model_inputs` says what of a micro-batch the
    model gets: how many of a row's first values, or the names of fields; absent: as its `forward` says.

    Then either `engine.train_step(micro_batches)`, or `loss = engine(batch)`, `engine.backward(loss)`,
    `engine.step()`, which updates after `accumulation` backward passes.
    """
    described = isinstance(model, (str, Mapping, Section))
    if not described and not callable(model):  # a module is callable, too
        message = f"a {type(model).__name__} is no model"
        raise ConfigError(Problem("model", message, "Give a module, a function that makes one, or a section."))
    sections = {
        "model": model if described else None,
        "optim": optim,
        "strategy": strategy,
        "precision": precision,
        "schedule": schedule,
        "seed": seed,
        "device": device,
        "train": None if clip_norm is None else {"clip_norm": clip_norm},
        "batch": {"accumulation": accumulation},
        "model_inputs": model_inputs,
    }
    parsed = parse_sections(**{key: value for key, value in sections.items() if value is not None})
    config = parsed.config
    check(config, has_val=False, require_length=False)
    world = world or open_world(config)
    batch = resolve_batch(
        config.batch, world.layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches
    )
    given = Preparation(
        config,
        world,
        model=None if isinstance(model, (str, Mapping, Section)) else model,
        loss_function=loss_fn,
        length=Length(total_steps, steps_per_epoch),
        accumulation=batch.accumulation,
        example=example,
        say=print if world.is_main else lambda _text: None,
    )
    return prepare_engine(given)
