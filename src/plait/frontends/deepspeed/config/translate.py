"""Translates a DeepSpeed configuration into a run description, with an outcome for every key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.config import RunConfig, parse, violations
from plait.errors import ConfigError, Problem
from plait.frontends import KeyOutcome, Translation
from plait.frontends.deepspeed.config import optimizer, precision, sections, zero
from plait.frontends.deepspeed.config.autotuning import AUTOTUNING_TABLE
from plait.frontends.deepspeed.config.keys import AUTO, SECTION, DeepSpeedSettings, Table
from plait.frontends.deepspeed.config.read import read_config

_SECRETS = ("api_key",)
_SWITCHES = {"true": True, "false": False}


def translate(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Translation:
    """Return the run description that a DeepSpeed configuration asks for, and the outcome of each of its keys.

    `config` is a file (JSON, comments allowed), a mapping, or base64. With `world_size`, the number of processes, the
    batch sizes are checked against it. `auto` has the values of dotted keys that are `"auto"`.

    Raise one `ConfigError` for all keys that DeepSpeed never had, values of a wrong type, and keys that contradict each
    other. A key that is not supported is `refused` in the report; `report.raise_refusals()` raises an error for these.
    """
    given = _filled(read_config(config), auto or {})
    today, old_names, problems = sections.renamed(given)
    settings = DeepSpeedSettings(today, HOMES, HINTS)
    settings.problems += problems
    if not SECTION.accepts(today):
        raise ConfigError(Problem("config", "a key is not a text", "Write keys as texts."))
    settings.read(today, TOP_TABLE)
    optimizer.clip_by_default(settings)
    precision.finish(settings)
    sections.check_batch_sizes(settings, world_size)
    if not settings.problems:
        settings.problems += _schema_problems(settings)
    if settings.problems:
        raise ConfigError([_under_old_name(problem, old_names) for problem in settings.problems])
    _finish_report(settings, old_names)
    order = [name for name in RunConfig.model_fields if name in settings.sections]
    return Translation({name: settings.sections[name] for name in order}, settings.report)


TOP_TABLE: Table = {
    **sections.BATCH_TABLE,
    **optimizer.OPTIMIZER_TABLE,
    **optimizer.SCHEDULER_TABLE,
    **precision.PRECISION_TABLE,
    **zero.ZERO_TABLE,
    **sections.PARALLEL_TABLE,
    **optimizer.GRADIENTS_TABLE,
    **sections.CHECKPOINTS_TABLE,
    **sections.COMPILING_TABLE,
    **sections.MONITORS_TABLE,
    **sections.OTHERS_TABLE,
    **sections.REMOVED_TABLE,
    **AUTOTUNING_TABLE,
}
"""Every top-level key that DeepSpeed has or had."""

KEYS = frozenset([*TOP_TABLE, *sections.OLD_NAMES])
"""The names of top-level keys, old ones included."""


def is_deepspeed(config: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of DeepSpeed, not of Plait; a few top-level keys exist in both."""
    if not any(key in KEYS for key in config):
        return False
    if not all(key in KEYS and key in RunConfig.model_fields for key in config):
        return not all(key in RunConfig.model_fields for key in config)
    try:  # all keys exist in both (`checkpoint`): it is DeepSpeed's if Plait cannot parse it
        parse(config)
    except ConfigError:
        return True
    return False


HOMES = {
    **{name: "fp16" for name in precision.FP16 if name != "enabled"},
    **dict.fromkeys(sections.ACTIVATIONS, "activation_checkpointing"),
    **dict.fromkeys(zero.STAGES, "zero_optimization"),
    **dict.fromkeys(("lr", "betas", "eps", "weight_decay", "momentum"), "optimizer.params"),
    **dict.fromkeys((name for table in optimizer.SCHEDULER_TYPES.values() for name in table), "scheduler.params"),
}
"""The section of keys that are often written one level too high or too low."""

_CLIPPING = "Write `gradient_clipping`."
_RATE = "Write `optimizer.params.lr`."
_MICRO = "Write `train_micro_batch_size_per_gpu`."
HINTS = {
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "clip_grad", "grad_clip", "max_norm"), _CLIPPING),
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr"), _RATE),
    **dict.fromkeys(("batch_size", "micro_batch_size", "micro_batch_size_per_gpu"), _MICRO),
    "gradient_checkpointing": "It is the model's to switch on; or write `strategy.recompute: full` for a run of Plait.",
    "mixed_precision": 'Write `"bf16": {"enabled": true}`.',
    "precision": 'Write `"bf16": {"enabled": true}`.',
    "warmup_steps": "Write `scheduler.params.warmup_num_steps`.",
    "zero_stage": "Write `zero_optimization.stage`.",
    "local_rank": "Leave it out: the launcher sets it.",
}
"""Remedies for keys of other frameworks."""


def _filled(config: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration in which keys that are `"auto"` have the values of `auto`."""
    filled: dict[str, Any] = _copied(config)
    for path, value in auto.items():
        *names, last = path.split(".")
        section: Any = filled
        for name in names:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(last) == AUTO:
            section[last] = value
    return filled


def _copied(value: Any) -> Any:
    """Return a copy of nested sections; other values, which may be the script's objects, are not copied.

    The text `"true"` becomes true, as in DeepSpeed.
    """
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _schema_problems(settings: DeepSpeedSettings) -> list[Problem]:
    """Return the problems that Plait's schema and rules find in the result, named by the DeepSpeed keys."""
    try:
        problems = violations(parse(settings.sections).config, has_val=False, require_length=False)
    except ConfigError as error:
        problems = list(error.problems)
    return [_under_deepspeed_key(settings, problem) for problem in problems]


def _under_deepspeed_key(settings: DeepSpeedSettings, problem: Problem) -> Problem:
    """Return the problem, named by the DeepSpeed key that set the wrong key of the run description, if one did."""
    path = f"{problem.path}."
    for setting, source in settings.sources.items():
        if path.startswith(f"{setting}.") or f"{setting}.".startswith(path):
            return Problem(source, f"{problem.message} (it becomes `{problem.path}`)", problem.remedy)
    return problem


def _under_old_name(problem: Problem, old_names: Mapping[str, str]) -> Problem:
    first, dot, rest = problem.path.partition(".")
    return replace(problem, path=f"{old_names.get(first, first)}{dot}{rest}")


def _finish_report(settings: DeepSpeedSettings, old_names: Mapping[str, str]) -> None:
    """Replace current names of keys by the old ones that the user wrote, and hide secrets."""
    for index, entry in enumerate(settings.report.entries):
        first, dot, rest = entry.key.partition(".")
        if first in old_names:
            outcome = KeyOutcome.MAPPED if entry.outcome is KeyOutcome.HONOURED else entry.outcome
            text = f"{entry.text} (`{first}` is its name today)"
            entry = replace(entry, key=f"{old_names[first]}{dot}{rest}", outcome=outcome, text=text)
        if isinstance(entry.value, Mapping) and any(name in entry.value for name in _SECRETS):
            entry = replace(entry, value={k: "…" if k in _SECRETS else v for k, v in entry.value.items()})
        settings.report.entries[index] = entry
