"""Engines: Plait's own and those of other libraries; which keys each supports, and its ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Tag

from plait.config.base import RefusedError, Section
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, name_or_custom
from plait.config.read import read
from plait.errors import ConfigError, MissingExtraError, WorldError

if TYPE_CHECKING:
    from plait.config.precision import ScalerConfig
    from plait.config.run import RunConfig

EngineWord = Literal["native", "deepspeed", "colossalai"]


class CustomEngine(CustomPart):
    """A custom engine: a subclass of `plait.Engine` with a class method `prepare`, or a function like that method."""

    plugin_kind = "engine"
    builtin = ("native", "deepspeed", "colossalai")


EngineChoice = Annotated[
    Annotated[EngineWord, Tag(BUILTIN_TAG)] | Annotated[CustomEngine, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomEngine)),
]

_SPREADS_DATA = frozenset(
    {
        "deterministic",
        "precision.compute",
        "precision.reduce",
        "precision.autocast",
        "precision.cast_inputs",
        "precision.scaler",
        "schedule",
        "strategy.config",
        "strategy.graphs",
        "strategy.kernels",
        "strategy.zero",
        "strategy.layout.dp_replicate",
        "strategy.layout.dp_shard",
        "train.clip_norm",
        "train.guard",
    }
)
_RECOMPUTES = frozenset({"strategy.recompute", "strategy.wrap"})


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine supports; the defaults are for engines that declare nothing."""

    honours: frozenset[str] = frozenset()
    """Keys of the run description that it supports besides `optim` and `batch`: a key includes all inside it, `*` is
    everything. The others of `ENGINE_KEYS` are refused."""
    stage: int | None = None
    """The ZeRO stage that it always has; None where `strategy.zero` sets it."""
    as_native: bool = True
    """Whether the plan of the native engine at the same stage is a good estimate."""

    def acts_on(self, path: str) -> bool:
        """Whether it supports a key."""
        names = path.split(".")
        return "*" in self.honours or any(".".join(names[:count]) in self.honours for count in range(1, len(names) + 1))


@dataclass(frozen=True, slots=True)
class BuiltinEngine:
    """An engine that comes with Plait."""

    builds: str
    """`package.module:name` of the function that prepares it."""
    traits: EngineTraits


ENGINE_KEYS = (
    "deterministic",
    "precision",
    "schedule",
    "strategy",
    "train.audit",
    "train.clip_norm",
    "train.clip_value",
    "train.guard",
)
"""The keys that an engine has to support, or to refuse; the Runner handles all others."""

ENGINES: Mapping[EngineWord, BuiltinEngine] = MappingProxyType(
    {
        "native": BuiltinEngine("plait.engine.prepare:prepare_native", EngineTraits(frozenset({"*"}))),
        "deepspeed": BuiltinEngine(
            "plait.engine.deepspeed:prepare_deepspeed", EngineTraits(_SPREADS_DATA | _RECOMPUTES)
        ),
        "colossalai": BuiltinEngine(
            "plait.engine.colossalai:prepare_colossalai",
            EngineTraits(_SPREADS_DATA | _RECOMPUTES | {"strategy.plugin"}),
        ),
    }
)
"""The engines that come with Plait, by name."""

PluginWord = Literal["low_level_zero", "gemini", "hybrid", "torch_ddp", "torch_fsdp"]

TESTED = {"deepspeed": "0.19.8", "colossalai": "0.5.0"}
"""The versions that Plait's tests train with; others are refused, as Plait reads private state."""
COMPANIONS = {"colossalai": {"transformers": "4.51.3", "peft": "0.13.2"}}
"""Packages that a library needs in exactly this version to be importable."""
_IMPORTS = {"colossalai": ("einops", "galore_torch", "contexttimer", "ninja")}
"""Packages that a library imports besides, in any version."""

_CHOICE_KEYS = ("strategy.auto", "strategy.engine")
_PLUGIN_STAGES = {"low_level_zero": 1, "gemini": 3, "hybrid": 0, "torch_ddp": 0, "torch_fsdp": 3}


def read_config_file(strategy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section with the content of the file that its `config` names, if it names one."""
    source = strategy.get("config")
    if not isinstance(source, str):
        return strategy
    try:
        return {**strategy, "config": read(source)}
    except ConfigError as error:
        problem = error.problems[0]
        raise RefusedError(f"`config` names {source!r}: {problem.message}", problem.remedy) from None


def config_value(config: Mapping[str, Any] | None, *keys: str) -> Any:
    """Return the value at a path of an engine's own configuration; None where it is missing or `auto`."""
    value: Any = config or {}
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return None if value == "auto" else value


def not_honoured(config: RunConfig, traits: EngineTraits) -> Iterator[tuple[str, Any]]:
    """Yield each key that was set and that the engine does not support, with its value."""
    for path in ENGINE_KEYS:
        section: Any = config
        *above, name = path.split(".")
        for key in above:
            section = getattr(section, key)
        yield from _keys_not_honoured(section, name, path, traits)


def _keys_not_honoured(section: Section, name: str, path: str, traits: EngineTraits) -> Iterator[tuple[str, Any]]:
    value, info = getattr(section, name), type(section).model_fields[name]
    if path in _CHOICE_KEYS or traits.acts_on(path) or name not in section.model_fields_set:
        return
    default = info.get_default(call_default_factory=True)
    if value == default:
        return
    if isinstance(value, Section) and isinstance(default, Section) and type(value) is type(default):
        for inner in type(value).model_fields:
            yield from _keys_not_honoured(value, inner, f"{path}.{inner}", traits)
    else:
        yield path, value


def engine_stage(
    engine: EngineWord | CustomEngine, plugin: PluginWord | None, config: Mapping[str, Any] | None
) -> int | None:
    """Return the ZeRO stage that the engine's own configuration sets; None where it does not."""
    if isinstance(engine, CustomEngine):
        return None
    if engine == "deepspeed":
        stage = config_value(config, "zero_optimization", "stage")
    else:
        key = {"low_level_zero": "stage", "hybrid": "zero_stage"}.get(plugin or "")
        stage = config_value(config, key) if key else _PLUGIN_STAGES.get(plugin or "")
    return stage if type(stage) is int and 0 <= stage <= 3 else None


def default_stage(plugin: PluginWord | None) -> int:
    """The stage of a plugin whose configuration names none; DeepSpeed without one does not shard."""
    return _PLUGIN_STAGES.get(plugin or "", 0)


def as_fp16_section(scaler: ScalerConfig) -> dict[str, Any]:
    """Return the loss scaler's settings as keys of DeepSpeed's section `fp16`."""
    return {
        "loss_scale": scaler.static or 0,
        "initial_scale_power": scaler.initial_power,
        "loss_scale_window": scaler.window,
        "hysteresis": scaler.hysteresis,
        "consecutive_hysteresis": scaler.consecutive_hysteresis,
        "min_loss_scale": scaler.minimum,
    }


def as_native(config: RunConfig, stage: int | None = None) -> RunConfig:
    """Return the run on the native engine at the same stage, which the plan of another engine uses.

    `stage` is that of an engine with a fixed stage.
    """
    strategy = config.strategy
    if strategy.engine == "native":
        return config
    kept = {name: getattr(strategy, name) for name in strategy.model_fields_set & {"layout", "recompute"}}
    zero = strategy.stage if stage is None else stage
    return config.model_copy(update={"strategy": type(strategy)(zero=zero, **kept)})


def check_library(engine: EngineWord | CustomEngine) -> None:
    """Refuse an engine whose library is missing, or does not fit the installed packages. Does not import it.

    A custom engine is checked when it is loaded; see `plait.engine.engines`.
    """
    if isinstance(engine, CustomEngine) or engine == "native":
        return
    if engine not in COMPANIONS and _version(engine) is None:
        raise MissingExtraError(engine, f"strategy.engine: {engine}", engine)
    wanted = {engine: TESTED[engine], **COMPANIONS.get(engine, {})}
    versions = {name: _version(name) for name in wanted}
    misfits = [
        f"{name} {versions[name] or 'absent'} (needs {need})" for name, need in wanted.items() if versions[name] != need
    ]
    if misfits:
        raise WorldError(
            f"strategy.engine: {engine} does not work with the installed packages: {', '.join(misfits)}; "
            f"in a separate environment: {_commands(engine)} (see docs/engines.md)"
        )


def _commands(engine: EngineWord) -> str:
    """Return the commands that install a library with the packages that it needs."""
    library = f"{engine}=={TESTED[engine]}"
    if engine not in COMPANIONS:
        return f"pip install {library}"
    others = " ".join([*_IMPORTS[engine], *(f"{name}=={need}" for name, need in COMPANIONS[engine].items())])
    # Installed without its declared requirements, for which pip would install an old version of torch.
    return f"pip install --no-deps {library} && pip install {others}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
