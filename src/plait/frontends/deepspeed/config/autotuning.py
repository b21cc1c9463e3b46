"""Translates DeepSpeed's section `autotuning` into a search of `plait tune`.

A search concerns many runs, so it is not a part of the run description, and is returned separately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.errors import Problem
from plait.frontends import KeyOutcome, KeyReport, honoured, unneeded
from plait.frontends.deepspeed.config.keys import (
    ANY,
    COUNT,
    FLAG,
    SECTION,
    DeepSpeedSettings,
    Key,
    Reader,
    Table,
    ValueType,
    one_of,
    setting,
)
from plait.frontends.deepspeed.config.read import read_config

if TYPE_CHECKING:
    from plait.tune import TuneConfig


@dataclass(frozen=True, slots=True)
class AutotuningSearch:
    """The search that a DeepSpeed configuration describes."""

    config: TuneConfig
    enabled: bool
    out: str | None
    """The folder for results; None where the section names none."""
    fresh: bool
    """Whether earlier results in that folder are removed."""
    report: KeyReport
    """The outcome of every key of the section."""


_FAST = ("zero", "micro")
_DEFAULTS: dict[str, Any] = {
    "tuner": "grid",
    "trials": 50,
    "early_stop": 5,
    "warmup": 2,
    "steps": 5,
    "micro_count": 3,
    "dimensions": _FAST,
}
_MODEL_INFO = "nothing has to be profiled first: the plan reads the model itself"
_GLOBAL_BATCH = "the global batch is the run's own, and trials only cut it differently"
_FOLDER = ValueType("a path", lambda value: isinstance(value, str) and value != "")
_SCALAR = ValueType("a number, a text, true or false", lambda value: isinstance(value, str | int | float))


def _choice(path: str, choices: Mapping[str, str]) -> Key:
    def read(settings: DeepSpeedSettings, key: str, value: str) -> None:
        settings.set(path, choices[value.lower()], key)
        settings.mapped(key, value, f"{path}: {choices[value.lower()]}")

    return Key(one_of(*choices), read)


def _switch(if_on: str, if_off: str) -> Reader:
    return lambda settings, key, value: settings.honoured(key, value, if_on if value else if_off)


def _fast(settings: DeepSpeedSettings, key: str, value: bool) -> None:
    """If true, search over ZeRO stage and micro-batch only, as DeepSpeed does; else over all that Plait can vary."""
    settings.set("dimensions", _FAST if value else None, key)
    settings.mapped(key, value, f"dimensions: {', '.join(_FAST) if value else 'all that can pay on the machine'}")


def _start_step(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Use the steps before this one, the first that DeepSpeed measures, as warm-up."""
    settings.set("warmup", int(value) - 1, key)
    settings.mapped(key, value, f"warmup: {int(value) - 1}")


def _mp_size(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if value == 1:
        settings.honoured(key, value, "no tensor parallelism")
        return
    settings.set("space", {"strategy.layout.tp": [int(value)]}, key)
    settings.mapped(key, value, f"strategy.layout.tp: {int(value)}")


AUTOTUNING: Table = {
    "enabled": Key(FLAG, _switch("a search is made", "no search is made")),
    "fast": Key(FLAG, _fast),
    "metric": _choice("metric", {"throughput": "throughput", "latency": "step_time", "flops": "throughput"}),
    "mp_size": Key(COUNT, _mp_size),
    "overwrite": Key(FLAG, _switch("earlier results are thrown away", "an earlier search is continued")),
    "results_dir": Key(_FOLDER, honoured("`out` of `plait tune`")),
    "start_profile_step": Key(COUNT, _start_step),
    "tuner_type": _choice("tuner", {"gridsearch": "grid", "random": "random", "model_based": "model"}),
    "tuner_early_stopping": setting("early_stop", COUNT),
    "tuner_num_trials": setting("trials", COUNT),
    "end_profile_step": setting("steps", COUNT),
    "max_train_micro_batch_size_per_gpu": setting("micro_max", COUNT),
    "min_train_micro_batch_size_per_gpu": setting("micro_min", COUNT),
    "num_tuning_micro_batch_sizes": setting("micro_count", COUNT),
    "arg_mappings": Key(
        ANY, unneeded("a trial gets its settings through the run description, not through a script's arguments")
    ),
    "exps_dir": Key(_SCALAR, unneeded("each trial has a folder of its own under the results")),
    "metric_path": Key(_SCALAR, unneeded("a trial's figures are read from its own events")),
    "model_info": Key(ANY, unneeded(_MODEL_INFO)),
    "model_info_path": Key(_SCALAR, unneeded(_MODEL_INFO)),
    "max_train_batch_size": Key(_SCALAR, unneeded(_GLOBAL_BATCH)),
    "min_train_batch_size": Key(_SCALAR, unneeded(_GLOBAL_BATCH)),
}
"""Every key that DeepSpeed reads, and the setting of a `TuneConfig` that it becomes."""


def search(config: str | os.PathLike[str] | Mapping[str, Any], *, nproc: int = 1) -> AutotuningSearch | None:
    """Return the search that the `autotuning` section asks for; None without that section."""
    section = read_config(config).get("autotuning")
    return translate_autotuning(section, nproc=nproc) if isinstance(section, Mapping) else None


def translate_autotuning(section: Mapping[str, Any], *, nproc: int = 1) -> AutotuningSearch:
    """Return the search that an `autotuning` section asks for, with the outcome of each key.

    Raise `ConfigError` for a key that DeepSpeed does not know, and for a value that would have another effect here.
    Absent keys about what is searched have DeepSpeed's defaults, other absent keys Plait's.
    """
    from plait.tune import make_tune_config

    settings = _read(section)
    settings.raise_problems()
    return AutotuningSearch(
        make_tune_config({"nproc": nproc, **settings.sections}, origin="autotuning"),
        enabled=settings.is_on("enabled"),
        out=settings.given("results_dir"),
        fresh=settings.is_on("overwrite"),
        report=settings.report,
    )


def _read(section: Mapping[str, Any]) -> DeepSpeedSettings:
    settings = DeepSpeedSettings(section, {}, {})
    settings.sections.update(_DEFAULTS)
    settings.read(section, AUTOTUNING, "autotuning")
    if not settings.problems:
        settings.problems += _contradictions(settings.sections)
    return settings


def _contradictions(settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each pair of keys (one may be a default of DeepSpeed) that leaves nothing to search."""
    from plait.tune import TuneConfig

    begin, end = settings["warmup"] + 1, settings["steps"]
    if begin > end:
        message = f"{begin}, but `end_profile_step` is {end}: nothing would be measured"
        yield Problem("autotuning.start_profile_step", message, "Let the end come after the start (3 and 5 if absent).")
    least, most = (settings.get(key, TuneConfig.model_fields[key].default) for key in ("micro_min", "micro_max"))
    if least > most:
        message = f"{least}, but `max_train_micro_batch_size_per_gpu` is {most}"
        remedy = "Make the smallest micro-batch no larger than the largest."
        yield Problem("autotuning.min_train_micro_batch_size_per_gpu", message, remedy)


def _report_section(settings: DeepSpeedSettings, key: str, section: Mapping[str, Any]) -> None:
    """Record the outcome of every key of the section in the report on the whole configuration."""
    tuned = _read(section)
    settings.problems += tuned.problems
    for entry in tuned.report.entries:
        tune = "" if entry.outcome is KeyOutcome.UNNEEDED else " (of `plait tune`)"
        settings.report.entries.append(replace(entry, text=f"{entry.text}{tune}"))


AUTOTUNING_TABLE: Table = {"autotuning": Key(SECTION, _report_section)}
