"""From a DeepSpeed configuration to a run description, with nothing dropped on the way."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.config import RunConfig, parse, show, violations
from plait.errors import ConfigError, Problem
from plait.frontends import KeyOutcome, Translation
from plait.frontends.deepspeed.config import optimizer, precision, zero
from plait.frontends.deepspeed.config import sections as batch
from plait.frontends.deepspeed.config import sections as checkpoints
from plait.frontends.deepspeed.config import sections as compiling
from plait.frontends.deepspeed.config import sections as monitors
from plait.frontends.deepspeed.config import sections as others
from plait.frontends.deepspeed.config import sections as parallel
from plait.frontends.deepspeed.config import sections as removed
from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.work import AUTO, SECTION, Key, Table, Work

if TYPE_CHECKING:
    from plait.tune import Translated

# `autotuning`: a search of `plait tune`. It is about many runs, and no part of the description of one.


_SECTIONS = ("arg_mappings", "model_info")


def search(config: str | os.PathLike[str] | Mapping[str, Any], *, nproc: int = 1) -> Translated | None:
    """The search that the `autotuning` section asks for; None where there is no such section."""
    from plait.tune import translate_autotuning

    section = read_config(config).get("autotuning")
    return translate_autotuning(_said(section), nproc=nproc) if isinstance(section, Mapping) else None


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section without what it leaves open."""
    return {name: value for name, value in section.items() if not _is_open(value)}


def _is_open(value: Any) -> bool:
    return value is None or value == AUTO


def _single(value: Any) -> bool:
    """Whether a value can be compared with words and counted with."""
    return not isinstance(value, list | Mapping) and not (isinstance(value, float) and not math.isfinite(value))


def _autotuning(work: Work, key: str, section: Mapping[str, Any]) -> None:
    from plait.tune import translate_autotuning

    if not section:
        work.leave(key, section, "an empty section says nothing")
    several = [name for name, value in section.items() if name not in _SECTIONS and not _single(value)]
    for name in several:
        message = f"{show(section[name])} is no single value"
        work.wrong(f"{key}.{name}", message, "Write a number, a word, true or false.")
    if several:
        return
    try:
        found = translate_autotuning(_said(section))
    except ConfigError as error:
        work.problems += error.problems
        return
    answers = {"honoured": work.honour, "mapped": work.map, "without meaning": work.leave}
    for entry in found.account:
        tune = " (of `plait tune`)" if entry.fate != "without meaning" else ""
        answers[entry.fate](f"{key}.{entry.key}", section[entry.key], f"{entry.words}{tune}")
    for name, value in section.items():
        if _is_open(value):
            work.map(f"{key}.{name}", value, "left open: the default of `plait tune`")


AUTOTUNING_TABLE: Table = {"autotuning": Key(SECTION, _autotuning)}

_SECRETS = ("api_key",)
_SWITCHES = {"true": True, "false": False}


def translate(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Translation:
    """The run description that a DeepSpeed configuration asks for, and the outcome of each of its keys.

    `config` is a file (JSON, comments allowed), a mapping, or base64. With `world_size`, the number of processes, the
    batch sizes are checked against it. `auto` has values for dotted keys that are left open with `"auto"`.

    A key that DeepSpeed never had, a value of the wrong type and two keys that contradict each other are a
    `ConfigError`, with all of them at once. A key that cannot be had is `refused` in the report, and not an error here:
    `report.raise_refusals()` makes it one.
    """
    given = _filled(read_config(config), auto or {})
    today, old_names, problems = removed.renamed(given)
    work = Work(today, world_size, HOMES, HINTS, problems=problems)
    if not SECTION.has(today):
        raise ConfigError(Problem("config", "a key is no text", "Write keys as texts."))
    work.walk("", today, TOP_TABLE)
    optimizer.clip_by_default(work)
    precision.finish(work)
    batch.check(work)
    if not work.problems:
        work.problems += _wrong_with(work)
    if work.problems:
        raise ConfigError([_named(problem, old_names) for problem in work.problems])
    _finish_account(work, old_names)
    order = [name for name in RunConfig.model_fields if name in work.sections]
    return Translation({name: work.sections[name] for name in order}, work.report)


TOP_TABLE: Table = {
    **batch.BATCH_TABLE,
    **optimizer.OPTIMIZER_TABLE,
    **optimizer.SCHEDULER_TABLE,
    **precision.PRECISION_TABLE,
    **zero.ZERO_TABLE,
    **parallel.PARALLEL_TABLE,
    **optimizer.GRADIENTS_TABLE,
    **checkpoints.CHECKPOINTS_TABLE,
    **compiling.COMPILING_TABLE,
    **monitors.MONITORS_TABLE,
    **others.OTHERS_TABLE,
    **removed.REMOVED_TABLE,
    **AUTOTUNING_TABLE,
}
"""Every top-level key that DeepSpeed has or had, and what becomes of it."""

KEYS = frozenset([*TOP_TABLE, *removed.OLD_NAMES])
"""The names of them, old ones included."""

HOMES = {
    **{name: "fp16" for name in precision.FP16 if name != "enabled"},
    **dict.fromkeys(others.ACTIVATIONS, "activation_checkpointing"),
    **dict.fromkeys(zero.STAGES, "zero_optimization"),
    **dict.fromkeys(("lr", "betas", "eps", "weight_decay", "momentum"), "optimizer.params"),
    **dict.fromkeys((name for table in optimizer.SCHEDULER_TYPES.values() for name in table), "scheduler.params"),
}
"""Where a key belongs that is often written one level too high or too low."""

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
    "local_rank": "Leave it out: the launcher says it.",
}
"""Words that are another framework's."""


def _filled(config: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the configuration with the values for what it leaves open."""
    filled: dict[str, Any] = _copied(config)
    for path, value in auto.items():
        *sections, last = path.split(".")
        place: Any = filled
        for name in sections:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and place.get(last) == AUTO:
            place[last] = value
    return filled


def _copied(value: Any) -> Any:
    """Sections copied, values not: some are objects of the script's own. `"true"` is true, to DeepSpeed too."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _wrong_with(work: Work) -> list[Problem]:
    """What Plait's own schema and rules say about the result, told in DeepSpeed's words."""
    try:
        found = violations(parse(work.sections).config, has_val=False, require_length=False)
    except ConfigError as error:
        found = list(error.problems)
    return [_retold(work, problem) for problem in found]


def _retold(work: Work, problem: Problem) -> Problem:
    """The same about the DeepSpeed key behind a key of the run description."""
    path = problem.path
    behind = [each for each in work.sources if f"{path}.".startswith(f"{each}.") or f"{each}.".startswith(f"{path}.")]
    if not behind:
        return problem
    return Problem(work.sources[behind[0]], f"{problem.message} (it becomes `{path}`)", problem.remedy)


def _named(problem: Problem, old_names: Mapping[str, str]) -> Problem:
    first, dot, rest = problem.path.partition(".")
    return replace(problem, path=f"{old_names.get(first, first)}{dot}{rest}")


def _finish_account(work: Work, old_names: Mapping[str, str]) -> None:
    """Old names as they were written, and no secret shown."""
    for index, entry in enumerate(work.report.entries):
        first, dot, rest = entry.key.partition(".")
        if first in old_names:
            outcome = KeyOutcome.MAPPED if entry.outcome is KeyOutcome.HONOURED else entry.outcome
            text = f"{entry.text} (`{first}` is its name today)"
            entry = replace(entry, key=f"{old_names[first]}{dot}{rest}", outcome=outcome, text=text)
        if isinstance(entry.value, Mapping) and any(name in entry.value for name in _SECRETS):
            entry = replace(entry, value={k: "…" if k in _SECRETS else v for k, v in entry.value.items()})
        work.report.entries[index] = entry
