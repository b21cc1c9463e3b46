"""Who makes the engine of a run, and what that engine says of itself.

An engine of one's own is named by `strategy.engine`: a subclass of `plait.Engine` with a class method `prepare`, or a
function with the same arguments. It gets one record of all that is to be prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from plait.config import (
    ENGINES,
    GOVERNED,
    EnginePart,
    EngineTraits,
    RunConfig,
    StrategyConfig,
    as_native,
    choose,
    load_code,
    unsupported,
)
from plait.errors import ConfigError, Problem
from plait.plugins import call, load
from plait.strategy.base import Engine
from plait.strategy.preparation import Preparation
from plait.world import seed_everything

_KEY = "strategy.engine"


class EngineMaker(Protocol):
    """What `strategy.engine` may name. Only `prepare` is needed, or the function itself; the rest is declared."""

    honours: ClassVar[tuple[str, ...]]
    """Keys of the run description that it acts on besides `optim` and `batch` (`strategy.zero`, `precision`); `*` for
    all. Absent: none, so that a description that sets one is refused."""
    stage: ClassVar[int | None]
    """The ZeRO stage that it always has. Absent: what `strategy.zero` says where it honours that, else 0."""
    as_native: ClassVar[bool]
    """Whether a plan of the native engine at that stage is near. Absent: true; where false, a run has no plan."""

    @classmethod
    def check_library(cls) -> None:
        """Raise an error of `plait.errors` where what it needs is not installed. Optional."""

    @classmethod
    def prepare(cls, given: Preparation, **arguments: Any) -> Engine:
        """Make a model ready to train; every rank calls it. `arguments` are the further keys of `strategy.engine`."""


def traits_of(strategy: StrategyConfig) -> EngineTraits:
    """What the engine of a run can do; one of the user's own is loaded for it.

    Raises `ConfigError` for a declaration that nobody could read.
    """
    engine = strategy.engine
    if not isinstance(engine, EnginePart):
        return ENGINES[engine].traits
    made = load(engine, _KEY)
    honours = getattr(made, "honours", ())
    if isinstance(honours, str) or not all(isinstance(each, str) for each in honours):
        raise _misfit(engine, f"its `honours` is {honours!r}", 'Write a tuple of keys: ("strategy.zero",).')
    for each in honours:
        if each != "*" and not _governed(each):
            raise _misfit(engine, f"its `honours` names {each!r}", choose(each, GOVERNED, "key"))
    stage = getattr(made, "stage", None)
    if stage is not None and (type(stage) is not int or not 0 <= stage <= 3):
        raise _misfit(engine, f"its `stage` is {stage!r}", "Write 0, 1, 2 or 3.")
    return EngineTraits(frozenset(honours), stage, bool(getattr(made, "as_native", True)))


def planned_as(config: RunConfig) -> RunConfig | str:
    """The run as a plan looks at it; or why there is no plan of it."""
    traits = traits_of(config.strategy)
    if not traits.as_native:
        return f"engine {config.strategy.engine_name} says that the native engine is not like it"
    return as_native(config, traits.stage)


def stage_of(strategy: StrategyConfig) -> int:
    """The ZeRO stage of a run, under any engine."""
    stage = traits_of(strategy).stage
    return strategy.stage if stage is None else stage


def prepare_engine(given: Preparation) -> Engine:
    """Make a model ready to train with the engine that `strategy.engine` names. No other library is loaded."""
    config, engine = given.config, given.config.strategy.engine
    if not isinstance(engine, EnginePart):
        made: Engine = load_code(ENGINES[engine].builds, key=_KEY)(given)
        return made
    traits = traits_of(config.strategy)
    if problems := list(unsupported(config, engine.type, traits)):
        raise ConfigError(problems)
    found = load(engine, _KEY)
    if (check := getattr(found, "check_library", None)) is not None:
        check()
    function: Callable[..., Any] | None = getattr(found, "prepare", None)
    if function is None and isinstance(found, type):
        raise _misfit(engine, "it is a class without a class method `prepare`", "Give it one, or name a function.")
    if not callable(function or found):
        raise _misfit(engine, f"it is a {type(found).__name__}", "Name a class with `prepare`, or a function.")
    built = call(function or found, _KEY, given, name=engine.type, arguments=engine.arguments)
    if not isinstance(built, Engine):
        raise _misfit(engine, f"it made a {type(built).__name__}", "Return a `plait.Engine`.")
    seed_everything(config.seed, given.world.rank // given.world.layout.tp)  # as under Plait's own engines
    return built


def _governed(path: str) -> bool:
    """Whether a key is one that engines act on, and exists."""
    if not any(path == each or path.startswith(f"{each}.") for each in GOVERNED):
        return False
    section: Any = RunConfig()
    for key in path.split("."):
        if key not in getattr(type(section), "model_fields", {}):
            return False
        section = getattr(section, key)
    return True


def _misfit(engine: EnginePart, message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"{_KEY}.type", f"{str(engine.type)!r} is no engine: {message}", remedy))
