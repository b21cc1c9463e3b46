"""DeepSpeed's `autotuning` section as a search of `plait tune`.

A search is about many runs, so it is returned beside the description of one run, not as a part of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.config import choose, show
from plait.errors import ConfigError, Problem
from plait.frontends import KeyOutcome
from plait.frontends.deepspeed.config.keys import AUTO, SECTION, DeepSpeedSettings, Key, Table
from plait.frontends.deepspeed.config.read import read_config

if TYPE_CHECKING:
    from plait.tune import TuneConfig


@dataclass(frozen=True, slots=True)
class AutotuningKey:
    """What one key of the section became; a key or value that is refused is an error and has none."""

    key: str
    outcome: KeyOutcome
    text: str
    """The setting that it became, or why it has no meaning here."""


@dataclass(frozen=True, slots=True)
class AutotuningSearch:
    """A search as a DeepSpeed configuration asks for it."""

    config: TuneConfig
    enabled: bool
    out: str | None
    """The folder for results; None where the section names none."""
    fresh: bool
    """Whether earlier results in it are thrown away."""
    keys: tuple[AutotuningKey, ...]
    """Every key of the section."""


Translated = tuple[dict[str, Any], KeyOutcome, str]
"""The settings of a `TuneConfig` that a key stands for, and the outcome and the text of its `AutotuningKey`."""

_TUNERS = {"gridsearch": "grid", "random": "random", "model_based": "model"}
_METRICS = {"throughput": "throughput", "latency": "step_time", "flops": "throughput"}
_STEP_PHASES = ("forward", "backward", "step")
_FAST = ("zero", "micro")
_UNNEEDED = {
    "arg_mappings": "a trial gets its settings through the run description, not through a script's arguments",
    "exps_dir": "each trial has a folder of its own under the results",
    "metric_path": "a trial's figures are read from its own events",
    "model_info": "nothing has to be profiled first: the plan reads the model itself",
    "model_info_path": "nothing has to be profiled first: the plan reads the model itself",
    "max_train_batch_size": "the global batch is the run's own, and trials only cut it differently",
    "min_train_batch_size": "the global batch is the run's own, and trials only cut it differently",
}
_COUNTS: dict[str, str] = {
    "tuner_early_stopping": "early_stop",
    "tuner_num_trials": "trials",
    "end_profile_step": "steps",
    "max_train_micro_batch_size_per_gpu": "micro_max",
    "min_train_micro_batch_size_per_gpu": "micro_min",
    "num_tuning_micro_batch_sizes": "micro_count",
}
_NESTED = ("arg_mappings", "model_info")


def search(config: str | os.PathLike[str] | Mapping[str, Any], *, nproc: int = 1) -> AutotuningSearch | None:
    """Return the search that the `autotuning` section asks for; None where there is no such section."""
    section = read_config(config).get("autotuning")
    return translate_autotuning(_without_auto(section), nproc=nproc) if isinstance(section, Mapping) else None


def translate_autotuning(section: Mapping[str, Any], *, nproc: int = 1) -> AutotuningSearch:
    """Return the search that an `autotuning` section asks for, with the outcome of each key.

    A key that DeepSpeed does not know is an error, and so is a value that would silently mean something else. For what
    the section leaves out, DeepSpeed's defaults are taken for what it searches, Plait's for the rest.
    """
    from plait.tune import make_tune_config

    settings: dict[str, Any] = {"nproc": nproc, "tuner": "grid", "trials": 50, "early_stop": 5}
    settings |= {"warmup": 2, "steps": 5, "micro_count": 3, "dimensions": _FAST}
    keys: list[AutotuningKey] = []
    problems: list[Problem] = []
    for key, value in section.items():
        if key not in AUTOTUNING_KEYS:
            remedy = choose(key, AUTOTUNING_KEYS, "key")
            problems.append(Problem(f"autotuning.{key}", "DeepSpeed's autotuner has no such key", remedy))
            continue
        try:
            changed, outcome, text = _translated(key, value)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        settings |= changed
        keys.append(AutotuningKey(key, outcome, text))
    problems += _contradictions(settings) if not problems else []
    if problems:
        raise ConfigError(problems)
    return AutotuningSearch(
        make_tune_config(settings, origin="autotuning"),
        enabled=bool(section.get("enabled", False)),
        out=section.get("results_dir"),
        fresh=bool(section.get("overwrite", False)),
        keys=tuple(keys),
    )


def _contradictions(settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Two keys, of which one may be DeepSpeed's default, that leave nothing to search."""
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


def _translated(key: str, value: Any) -> Translated:
    if key in _UNNEEDED:
        return {}, KeyOutcome.UNNEEDED, _UNNEEDED[key]
    if key in _COUNTS:
        return {_COUNTS[key]: _whole(key, value)}, KeyOutcome.HONOURED, f"{_COUNTS[key]}: {value}"
    return _OTHERS[key](value)


def _whole(key: str, value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 1:
        raise ConfigError(Problem(f"autotuning.{key}", f"{show(value)} is not a count", "Write a whole number from 1."))
    return int(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        message = f"{show(value)} is neither true nor false"
        raise ConfigError(Problem(f"autotuning.{key}", message, "Write one of them."))
    return value


def _choice(key: str, value: Any, choices: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            Problem(f"autotuning.{key}", f"{show(value)} is unknown", choose(str(value), choices, "word"))
        )
    return choices[value]


def _enabled(value: Any) -> Translated:
    return {}, KeyOutcome.HONOURED, "a search is made" if _flag("enabled", value) else "no search is made"


def _fast(value: Any) -> Translated:
    """Fast, DeepSpeed varies the stage and the micro-batch; otherwise all that it knows, as here all that we know."""
    if _flag("fast", value):
        return {"dimensions": _FAST}, KeyOutcome.MAPPED, f"dimensions: {', '.join(_FAST)}"
    return {"dimensions": None}, KeyOutcome.MAPPED, "dimensions: all that can pay on the machine"


def _metric(value: Any) -> Translated:
    if value in _STEP_PHASES:
        message = f"{show(value)} is a part of a step, and trials are compared by whole steps"
        raise ConfigError(Problem("autotuning.metric", message, "Write throughput or latency."))
    metric = _choice("metric", value, _METRICS)
    return {"metric": metric}, KeyOutcome.MAPPED, f"metric: {metric}"


def _tuner(value: Any) -> Translated:
    tuner = _choice("tuner_type", value, _TUNERS)
    return {"tuner": tuner}, KeyOutcome.MAPPED, f"tuner: {tuner}"


def _start_step(value: Any) -> Translated:
    """DeepSpeed measures from this step on, so those before it are the warm-up."""
    warmup = _whole("start_profile_step", value) - 1
    return {"warmup": warmup}, KeyOutcome.MAPPED, f"warmup: {warmup}"


def _mp_size(value: Any) -> Translated:
    size = _whole("mp_size", value)
    if size == 1:
        return {}, KeyOutcome.HONOURED, "no tensor parallelism"
    return {"space": {"strategy.layout.tp": [size]}}, KeyOutcome.MAPPED, f"strategy.layout.tp: {size}"


def _overwrite(value: Any) -> Translated:
    text = "earlier results are thrown away" if _flag("overwrite", value) else "an earlier search is continued"
    return {}, KeyOutcome.HONOURED, text


def _results_dir(value: Any) -> Translated:
    if not isinstance(value, str) or not value:
        raise ConfigError(Problem("autotuning.results_dir", f"{show(value)} is not a folder", "Write a path."))
    return {}, KeyOutcome.HONOURED, f"out: {value}"


_OTHERS: dict[str, Callable[[Any], Translated]] = {
    "enabled": _enabled,
    "fast": _fast,
    "metric": _metric,
    "mp_size": _mp_size,
    "overwrite": _overwrite,
    "results_dir": _results_dir,
    "start_profile_step": _start_step,
    "tuner_type": _tuner,
}
AUTOTUNING_KEYS = tuple(sorted([*_UNNEEDED, *_COUNTS, *_OTHERS]))
"""Every key that DeepSpeed reads."""


def _report_section(settings: DeepSpeedSettings, key: str, section: Mapping[str, Any]) -> None:
    """Report the outcome of every key of the section, where a whole configuration is translated."""
    if not section:
        settings.unneeded(key, section, "an empty section says nothing")
    several = [name for name, value in section.items() if name not in _NESTED and not _is_single(value)]
    for name in several:
        message = f"{show(section[name])} is not a single value"
        settings.wrong(f"{key}.{name}", message, "Write a number, a word, true or false.")
    if several:
        return
    try:
        asked = translate_autotuning(_without_auto(section))
    except ConfigError as error:
        settings.problems += error.problems
        return
    for entry in asked.keys:
        tune = "" if entry.outcome is KeyOutcome.UNNEEDED else " (of `plait tune`)"
        settings.report.add(entry.outcome, f"{key}.{entry.key}", section[entry.key], f"{entry.text}{tune}")
    for name, value in section.items():
        if _is_auto(value):
            settings.mapped(f"{key}.{name}", value, "left open: the default of `plait tune`")


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if not _is_auto(value)}


def _is_auto(value: Any) -> bool:
    return value is None or value == AUTO


def _is_single(value: Any) -> bool:
    return not isinstance(value, list | Mapping) and not (isinstance(value, float) and not math.isfinite(value))


AUTOTUNING_TABLE: Table = {"autotuning": Key(SECTION, _report_section)}
