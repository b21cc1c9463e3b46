"""Translates the arguments of an `Accelerator` into a run description."""

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
from plait.frontends.accelerate.utils.dataclasses import (
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

_BUILT_BY_SCRIPT = ("optim", "schedule")
"""Sections that are not used: the script builds its optimizer and scheduler, or passes a `DummyOptim`."""
_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
_PLUGINS = (FullyShardedDataParallelPlugin, DeepSpeedPlugin, ParallelismConfig, TorchDynamoPlugin)
_RUNNER_SECTIONS = frozenset({"log", "checkpoint", "work_dir", "hooks", "plan"})


def build_config(
    file: str | Path | None,
    plugins: Sequence[Any],
    handlers: Sequence[Any],
    *,
    mixed_precision: str | None,
    cpu: bool,
    sections: Mapping[str, Any] | None,
) -> tuple[RunConfig, KeyReport]:
    """Return the run description, and the report on every key of the file and the plugins.

    A plugin overrides the file; `sections`, which are sections of a run description, override both.
    """
    given: dict[str, Any] = dict(read(file)) if file is not None else {}
    _refuse_unknown("kwargs_handlers", handlers, _HANDLERS)
    _refuse_unknown("a plugin", plugins, _PLUGINS)
    for plugin in plugins:
        given.update(plugin.as_config())
    if mixed_precision is not None:
        given["mixed_precision"] = str(getattr(mixed_precision, "value", mixed_precision))
    if cpu:
        given["use_cpu"] = True
    translation = translate(given)
    translation.report.raise_refusals()
    result = _sections_of_a_loop(translation)
    for argument in (*handlers, *plugins):
        if isinstance(argument, FullyShardedDataParallelPlugin):
            result = merged(result, {"precision": argument.precision()})
        elif hasattr(argument, "sections"):
            result = merged(result, argument.sections())
    result = merged(result, sections or {})
    if _compute(result) == "fp16" and given.get("distributed_type") != "DEEPSPEED":
        scaler = next((handler for handler in handlers if isinstance(handler, GradScalerKwargs)), GradScalerKwargs())
        result = merged({"precision": {"scaler": _scaler(scaler)}}, result)
    config = parse_sections(**result).config
    check(config, has_val=False, require_length=False)
    _refuse_axes(config)
    return config, translation.report


_REQUESTS = {
    "USE_FSDP": "FSDP",
    "USE_DEEPSPEED": "DeepSpeed",
    "USE_MEGATRON_LM": "Megatron-LM",
    "USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def arguments_of_launcher(variables: Mapping[str, str], *, configured: bool) -> dict[str, Any]:
    """Return the arguments of an `Accelerator` that `accelerate launch` passes in environment variables.

    Single values, such as the precision, are returned. Features with a section of their own (FSDP, DeepSpeed, …)
    raise `ConfigError`, unless `configured`: the script itself sets the strategy.
    """
    requests = [text for name, text in _REQUESTS.items() if variables.get(name, "").lower() in ("true", "1", "yes")]
    if variables.get("DYNAMO_BACKEND", "no").lower() != "no":
        requests.append("torch.compile")
    if requests and not configured:
        message = f"asks for {' and '.join(requests)} in environment variables, which are not supported"
        remedy = "Write Accelerator(config_file=…) with the file that it reads."
        raise ConfigError(Problem("accelerate launch", message, remedy))
    arguments: dict[str, Any] = {}
    if variables.get("MIXED_PRECISION", "no") != "no":
        arguments["mixed_precision"] = variables["MIXED_PRECISION"]
    if variables.get("USE_CPU", "").lower() in ("true", "1", "yes"):
        arguments["cpu"] = True
    if variables.get("GRADIENT_ACCUMULATION_STEPS", "1").isdigit():
        arguments["gradient_accumulation_steps"] = int(variables.get("GRADIENT_ACCUMULATION_STEPS", "1"))
    return arguments


def deepspeed_plugin_of(file: str | Path | None) -> DeepSpeedPlugin | None:
    """Return the plugin that Accelerate builds from a file with `distributed_type: DEEPSPEED`; None for other files."""
    config = read(file) if file is not None else {}
    if config.get("distributed_type") != "DEEPSPEED":
        return None
    section = config.get("deepspeed_config") or {}
    names = {"deepspeed_config_file": "hf_ds_config", "deepspeed_moe_layer_cls_names": "transformer_moe_cls_names"}
    given = {names.get(name, name): value for name, value in section.items() if value not in (None, "none")}
    known = {field.name for field in fields(DeepSpeedPlugin)}
    return DeepSpeedPlugin(**{name: value for name, value in given.items() if name in known})


def _sections_of_a_loop(translation: Translation) -> dict[str, Any]:
    """Return the sections that apply to a user's own training loop; record the others as unneeded."""
    for section in _RUNNER_SECTIONS & translation.sections.keys():
        text = "the script itself logs and saves"
        translation.report.add(KeyOutcome.UNNEEDED, f"(section {section})", translation.sections[section], text)
    return {
        section: value
        for section, value in translation.sections.items()
        if section not in (*_RUNNER_SECTIONS, *_BUILT_BY_SCRIPT)
    }


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings merged, section by section; where they differ, the value of `other` is used."""
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
    """Return the section `precision.scaler` for the arguments of torch's GradScaler."""
    power = math.log2(kwargs.init_scale)
    problems = []
    if not power.is_integer():
        problems.append(Problem("GradScalerKwargs.init_scale", f"{kwargs.init_scale}", "Write a power of two."))
    for name, supported in (("growth_factor", 2.0), ("backoff_factor", 0.5), ("enabled", True)):
        if getattr(kwargs, name) != supported:
            message = f"{getattr(kwargs, name)} is not supported: the scale doubles and halves"
            problems.append(Problem(f"GradScalerKwargs.{name}", message, f"Write {supported}."))
    if problems:
        raise ConfigError(problems)
    return {"initial_power": int(power), "window": kwargs.growth_interval, "hysteresis": 1}


def _refuse_unknown(argument: str, given: Sequence[Any], known: tuple[type, ...]) -> None:
    for value in given:
        if not isinstance(value, known):
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            names = ", ".join(cls.__name__ for cls in known)
            remedy = f"Take one of {names} from plait.frontends.accelerate.utils."
            raise ConfigError(Problem(argument, f"{name} is not supported", remedy))


def _refuse_axes(config: RunConfig) -> None:
    for axis, effect in (("pp", "runs several micro-batches at once"), ("cp", "splits each sequence")):
        if getattr(config.strategy.layout, axis) > 1:
            message = f"{effect}, which is not supported in a loop that calls the model itself"
            raise ConfigError(Problem(f"strategy.layout.{axis}", message, "Use `plait train` or `Runner` for it."))
