"""Choose and build the engine of a run: Plait's own, or one that the user provides.

`strategy.engine` names a user-provided engine: a subclass of `plait.Engine` with a class method `prepare`, or a
function with the same arguments. It receives one record, a `Preparation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import nn

from plait.config import (
    ENGINE_KEYS,
    ENGINES,
    CustomEngine,
    DeviceArgument,
    EngineTraits,
    ModelArgument,
    OptimArgument,
    PrecisionArgument,
    RunConfig,
    ScheduleArgument,
    Section,
    StrategyArgument,
    StrategyConfig,
    as_native,
    check,
    choose,
    load_code,
    parse_sections,
    refuse_unknown_keywords,
    resolve_batch,
    unsupported,
)
from plait.distributed import World, open_world, seed_everything
from plait.engine.base import Engine
from plait.engine.loss import LossFunction
from plait.engine.preparation import Preparation, RunLength
from plait.errors import ConfigError, Problem
from plait.plugins import call, load

_KEY = "strategy.engine"


class EngineFactory(Protocol):
    """The interface of a class that `strategy.engine` may name. Only `prepare` is required."""

    honours: ClassVar[tuple[str, ...]]
    """Keys of the run description that it acts on besides `optim` and `batch` (`strategy.zero`, `precision`); `*` for
    all. Absent: none, so that a description that sets one is refused."""
    stage: ClassVar[int | None]
    """The ZeRO stage that it always has. Absent: that of `strategy.zero` if it honours the key, else 0."""
    as_native: ClassVar[bool]
    """Whether the memory and time that `plait plan` predicts for Plait's own engine at that stage are a good estimate.
    Absent: true. False: the run has no plan."""

    @classmethod
    def check_library(cls) -> None:
        """Raise an error of `plait.errors` if a library that it needs is not installed. Optional."""

    @classmethod
    def prepare(cls, given: Preparation, **arguments: Any) -> Engine:
        """Return an engine for the model in `given`; every rank calls it. `arguments` are other keys of the section."""


def traits_of(strategy: StrategyConfig) -> EngineTraits:
    """Return what a run's engine declares to support; a user-provided engine is imported for that.

    Raises `ConfigError` for a malformed declaration.
    """
    engine = strategy.engine
    if not isinstance(engine, CustomEngine):
        return ENGINES[engine].traits
    made = load(engine, _KEY)
    honours = getattr(made, "honours", ())
    if isinstance(honours, str) or not all(isinstance(key, str) for key in honours):
        raise _misfit(engine, f"its `honours` is {honours!r}", 'Write a tuple of keys: ("strategy.zero",).')
    for key in honours:
        if key != "*" and not _governed(key):
            raise _misfit(engine, f"its `honours` names {key!r}", choose(key, ENGINE_KEYS, "key"))
    stage = getattr(made, "stage", None)
    if stage is not None and (type(stage) is not int or not 0 <= stage <= 3):
        raise _misfit(engine, f"its `stage` is {stage!r}", "Write 0, 1, 2 or 3.")
    return EngineTraits(frozenset(honours), stage, bool(getattr(made, "as_native", True)))


def planned_as(config: RunConfig) -> RunConfig | str:
    """Return the run description that `plait plan` simulates for a run, or the reason why it cannot."""
    traits = traits_of(config.strategy)
    if not traits.as_native:
        return f"engine {config.strategy.engine_name} declares `as_native = False`: it cannot be planned"
    return as_native(config, traits.stage)


def stage_of(strategy: StrategyConfig) -> int:
    """Return the ZeRO stage of a run, under any engine."""
    stage = traits_of(strategy).stage
    return strategy.stage if stage is None else stage


def prepare_engine(given: Preparation) -> Engine:
    """Return an engine of the class that `strategy.engine` names, for the model in `given`; import no other library."""
    config, engine = given.config, given.config.strategy.engine
    if not isinstance(engine, CustomEngine):
        made: Engine = load_code(ENGINES[engine].builds, key=_KEY)(given)
        return made
    traits = traits_of(config.strategy)
    if problems := list(unsupported(config, engine.type, traits)):
        raise ConfigError(problems)
    target = load(engine, _KEY)
    if (check := getattr(target, "check_library", None)) is not None:
        check()
    function: Callable[..., Any] | None = getattr(target, "prepare", None)
    if function is None and isinstance(target, type):
        raise _misfit(engine, "it is a class without a class method `prepare`", "Add one, or name a function.")
    if not callable(function or target):
        raise _misfit(engine, f"it is a {type(target).__name__}", "Name a class with `prepare`, or a function.")
    built = call(function or target, _KEY, given, name=engine.type, arguments=engine.arguments)
    if not isinstance(built, Engine):
        raise _misfit(engine, f"it made a {type(built).__name__}", "Return a `plait.Engine`.")
    seed_everything(config.seed, given.world.rank // given.world.layout.tp)  # as under Plait's own engines
    return built


def _governed(path: str) -> bool:
    """Whether a key exists and is one of `ENGINE_KEYS`, or inside one."""
    if not any(path == governed or path.startswith(f"{governed}.") for governed in ENGINE_KEYS):
        return False
    section: Any = RunConfig()
    for key in path.split("."):
        if key not in getattr(type(section), "model_fields", {}):
            return False
        section = getattr(section, key)
    return True


def _misfit(engine: CustomEngine, message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"{_KEY}.type", f"{str(engine.type)!r} is not an engine: {message}", remedy))


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
    """Return an engine that trains a model in a custom loop; most arguments are sections of a run description.

    `model` is a module, or a function that builds one: if it can be built on the meta device, no rank ever holds more
    than its shards. It may also be a section that describes one: `plait.LlamaModel(…)`, `{"type": "llama", …}`,
    `"my:Net"`.

    `loss_fn(outputs, batch)` computes a loss from the model's outputs. `model_inputs` selects what the model receives
    of a micro-batch: a number n, for the first n values of a tuple, or the names of fields. If it is absent, the
    signature of `forward` decides.

    The loop then calls either `engine.train_step(micro_batches)`, or `loss = engine(batch)`, `engine.backward(loss)`
    and `engine.step()`, which updates the weights after every `accumulation` backward passes.
    """
    described = isinstance(model, (str, Mapping, Section))
    if not described and not callable(model):  # a module is callable, too
        message = f"a {type(model).__name__} is not a model"
        raise ConfigError(Problem("model", message, "Give a module, a function that builds one, or a section."))
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
        length=RunLength(total_steps, steps_per_epoch),
        accumulation=batch.accumulation,
        example=example,
        log=print if world.is_main else lambda _text: None,
    )
    return prepare_engine(given)
