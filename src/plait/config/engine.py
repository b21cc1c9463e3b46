"""Another library as the engine of a run: which there are, what each may be told, which stage that is."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from plait.config.base import RefusedError
from plait.config.read import read
from plait.errors import ConfigError, MissingExtraError, WorldError

if TYPE_CHECKING:
    from plait.config.precision import ScalerConfig
    from plait.config.run import RunConfig

EngineWord = Literal["native", "deepspeed", "colossalai"]
PluginWord = Literal["low_level_zero", "gemini", "hybrid", "torch_ddp", "torch_fsdp"]

TESTED = {"deepspeed": "0.19.8", "colossalai": "0.5.0"}
"""The versions that Plait's tests have trained with; states are read from inside, so no other is promised."""
COMPANIONS = {"colossalai": {"transformers": "4.51.3", "peft": "0.13.2"}}
"""What has to be installed beside a library in exactly this version for it to be importable at all."""
_IMPORTS = {"colossalai": ("einops", "galore_torch", "contexttimer", "ninja")}
"""What such a library imports besides, in any version."""

_PLUGIN_STAGES = {"low_level_zero": 1, "gemini": 3, "hybrid": 0, "torch_ddp": 0, "torch_fsdp": 3}


def with_file_read(strategy: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with its `config` as keys and values, where it names a file."""
    source = strategy.get("config")
    if not isinstance(source, str):
        return strategy
    try:
        return {**strategy, "config": read(source)}
    except ConfigError as error:
        problem = error.problems[0]
        raise RefusedError(f"`config` names {source!r}: {problem.message}", problem.remedy) from None


def told(config: Mapping[str, Any] | None, *keys: str) -> Any:
    """What an engine's own configuration says at a path; None where it says nothing, or `auto`."""
    found: Any = config or {}
    for key in keys:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return None if found == "auto" else found


def engine_stage(engine: EngineWord, plugin: PluginWord | None, config: Mapping[str, Any] | None) -> int | None:
    """The ZeRO stage that the engine's own keys ask for; None where they leave it open."""
    if engine == "deepspeed":
        stage = told(config, "zero_optimization", "stage")
    else:
        key = {"low_level_zero": "stage", "hybrid": "zero_stage"}.get(plugin or "")
        stage = told(config, key) if key else _PLUGIN_STAGES.get(plugin or "")
    return stage if type(stage) is int and 0 <= stage <= 3 else None


def usual_stage(plugin: PluginWord | None) -> int:
    """The stage of a plugin that is not told one; DeepSpeed without one does not shard."""
    return _PLUGIN_STAGES.get(plugin or "", 0)


def in_deepspeed_words(scaler: ScalerConfig) -> dict[str, Any]:
    """The loss scale as DeepSpeed's section `fp16` says it."""
    return {
        "loss_scale": scaler.static or 0,
        "initial_scale_power": scaler.initial_power,
        "loss_scale_window": scaler.window,
        "hysteresis": scaler.hysteresis,
        "consecutive_hysteresis": scaler.consecutive_hysteresis,
        "min_loss_scale": scaler.minimum,
    }


def as_native(config: RunConfig) -> RunConfig:
    """The run on Plait's own engine at the same stage: what another engine's run is planned as."""
    strategy = config.strategy
    if strategy.engine == "native":
        return config
    kept = {name: getattr(strategy, name) for name in strategy.model_fields_set & {"layout", "recompute"}}
    return config.model_copy(update={"strategy": type(strategy)(zero=strategy.stage, **kept)})


def check_library(engine: EngineWord) -> None:
    """Refuse an engine whose library is not here, or cannot work with what is; costs no import of it."""
    if engine == "native":
        return
    if engine not in COMPANIONS and _version(engine) is None:
        raise MissingExtraError(engine, f"strategy.engine: {engine}", engine)
    wanted = {engine: TESTED[engine], **COMPANIONS.get(engine, {})}
    found = {name: _version(name) for name in wanted}
    misfits = [
        f"{name} {found[name] or 'absent'} (needs {need})" for name, need in wanted.items() if found[name] != need
    ]
    if misfits:
        raise WorldError(
            f"strategy.engine: {engine} cannot work with what is installed: {', '.join(misfits)}; "
            f"in an environment of its own: {_commands(engine)} (see docs/engines.md)"
        )


def _commands(engine: EngineWord) -> str:
    """What installs a library so that it works."""
    library = f"{engine}=={TESTED[engine]}"
    if engine not in COMPANIONS:
        return f"pip install {library}"
    others = " ".join([*_IMPORTS[engine], *(f"{name}=={need}" for name, need in COMPANIONS[engine].items())])
    # With what it says it requires, pip would put back torch to a version of its time.
    return f"pip install --no-deps {library} && pip install {others}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
