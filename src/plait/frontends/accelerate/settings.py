"""From what an `Accelerator` was given to one run description."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from plait.config import RunConfig, check, parse_sections, read
from plait.errors import ConfigError, Problem
from plait.frontends import KeyOutcome, KeyReport, Translation
from plait.frontends.accelerate.config import translate
from plait.frontends.accelerate.plugins import (
    AutocastKwargs,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    TorchDynamoPlugin,
)

_DESCRIBED = ("optim", "schedule")
"""What a script may have made as a DeepSpeed configuration describes it: see `dummies`."""
_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
_PLUGINS = (FullyShardedDataParallelPlugin, DeepSpeedPlugin, ParallelismConfig, TorchDynamoPlugin)
_IDLE = frozenset({"log", "checkpoint", "work_dir", "hooks", "plan"})


def build_config(
    file: str | Path | None,
    plugins: Sequence[Any],
    handlers: Sequence[Any],
    *,
    mixed_precision: str | None,
    cpu: bool,
    sections: Mapping[str, Any] | None,
) -> tuple[RunConfig, KeyReport]:
    """The run description, and the account of every key of the file and the plugins.

    A plugin stands over the file; `sections`, in Plait's own words, over both.
    """
    words: dict[str, Any] = dict(read(file)) if file is not None else {}
    _refuse_strangers("kwargs_handlers", handlers, _HANDLERS)
    _refuse_strangers("a plugin", plugins, _PLUGINS)
    for plugin in plugins:
        words.update(plugin.as_config())
    if mixed_precision is not None:
        words["mixed_precision"] = str(getattr(mixed_precision, "value", mixed_precision))
    if cpu:
        words["use_cpu"] = True
    found = translate(words)
    found.report.raise_refusals()
    result = _for_a_script(found)
    for each in (*handlers, *plugins):
        if isinstance(each, FullyShardedDataParallelPlugin):
            result = merged(result, {"precision": each.precision()})
        elif hasattr(each, "sections"):
            result = merged(result, each.sections())
    result = merged(result, sections or {})
    if _compute(result) == "fp16" and words.get("distributed_type") != "DEEPSPEED":
        scaler = next((each for each in handlers if isinstance(each, GradScalerKwargs)), GradScalerKwargs())
        result = merged({"precision": {"scaler": _scaler(scaler)}}, result)
    config = parse_sections(**result).config
    check(config, has_val=False, require_length=False)
    _refuse_axes(config)
    return config, found.report


_ASKED = {
    "USE_FSDP": "FSDP",
    "USE_DEEPSPEED": "DeepSpeed",
    "USE_MEGATRON_LM": "Megatron-LM",
    "USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def heed_launcher(told: Mapping[str, str], *, answered: bool) -> dict[str, Any]:
    """Arguments of an `Accelerator` that `accelerate launch` has for it.

    The few that are one word each are taken. Whole sections come in a variable for each key, and are refused, unless
    the script has `answered` how it is to be spread.
    """
    asked = [word for name, word in _ASKED.items() if told.get(name, "").lower() in ("true", "1", "yes")]
    if told.get("DYNAMO_BACKEND", "no").lower() != "no":
        asked.append("torch.compile")
    if asked and not answered:
        message = f"asks for {' and '.join(asked)} in variables that are not read here"
        remedy = "Write Accelerator(config_file=…) with the file that it reads."
        raise ConfigError(Problem("accelerate launch", message, remedy))
    found: dict[str, Any] = {}
    if told.get("MIXED_PRECISION", "no") != "no":
        found["mixed_precision"] = told["MIXED_PRECISION"]
    if told.get("USE_CPU", "").lower() in ("true", "1", "yes"):
        found["cpu"] = True
    if told.get("GRADIENT_ACCUMULATION_STEPS", "1").isdigit():
        found["gradient_accumulation_steps"] = int(told.get("GRADIENT_ACCUMULATION_STEPS", "1"))
    return found


def plugin_of(file: str | Path | None) -> DeepSpeedPlugin | None:
    """The plugin that Accelerate makes of a file which asks for DeepSpeed."""
    words = read(file) if file is not None else {}
    if words.get("distributed_type") != "DEEPSPEED":
        return None
    section = words.get("deepspeed_config") or {}
    names = {"deepspeed_config_file": "hf_ds_config", "deepspeed_moe_layer_cls_names": "transformer_moe_cls_names"}
    given = {names.get(name, name): value for name, value in section.items() if value not in (None, "none")}
    known = {each.name for each in fields(DeepSpeedPlugin)}
    return DeepSpeedPlugin(**{name: value for name, value in given.items() if name in known})


def _for_a_script(found: Translation) -> dict[str, Any]:
    """The sections that say something about a loop of the user's own; of the others the account tells."""
    for section in _IDLE & found.sections.keys():
        text = "a script logs and saves by itself"
        found.report.add(KeyOutcome.UNNEEDED, f"(section {section})", found.sections[section], text)
    return {section: value for section, value in found.sections.items() if section not in (*_IDLE, *_DESCRIBED)}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second over the first; a shorthand of a whole section replaces it."""
    result = dict(one)
    for key, value in other.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def _compute(sections: Mapping[str, Any]) -> Any:
    precision = sections.get("precision", {})
    return precision if isinstance(precision, str) else precision.get("compute")


def _scaler(kwargs: GradScalerKwargs) -> dict[str, Any]:
    """torch's GradScaler in Plait's words."""
    power = math.log2(kwargs.init_scale)
    problems = []
    if not power.is_integer():
        problems.append(Problem("GradScalerKwargs.init_scale", f"{kwargs.init_scale}", "Write a power of two."))
    for name, usual in (("growth_factor", 2.0), ("backoff_factor", 0.5), ("enabled", True)):
        if getattr(kwargs, name) != usual:
            message = f"{getattr(kwargs, name)} cannot be had: the scale doubles and halves"
            problems.append(Problem(f"GradScalerKwargs.{name}", message, f"Write {usual}."))
    if problems:
        raise ConfigError(problems)
    return {"initial_power": int(power), "window": kwargs.growth_interval, "hysteresis": 1}


def _refuse_strangers(argument: str, given: Sequence[Any], known: tuple[type, ...]) -> None:
    for each in given:
        if not isinstance(each, known):
            name = f"{type(each).__module__}.{type(each).__qualname__}"
            names = ", ".join(kind.__name__ for kind in known)
            remedy = f"Take it from plait.frontends.accelerate.utils; there are {names}."
            raise ConfigError(Problem(argument, f"{name} is not known here", remedy))


def _refuse_axes(config: RunConfig) -> None:
    for axis, why in (("pp", "runs several micro-batches at once"), ("cp", "cuts each sequence")):
        if getattr(config.strategy.layout, axis) > 1:
            message = f"{why}: a loop that calls the model itself cannot do that"
            raise ConfigError(Problem(f"strategy.layout.{axis}", message, "Use `plait train` or `Runner` for it."))
