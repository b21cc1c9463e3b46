"""DeepSpeed's `autotuning` section, in the words of `plait tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plait.config import choose, show
from plait.errors import ConfigError, Problem
from plait.tune.config import TuneConfig, make_tune_config

Fate = Literal["honoured", "mapped", "without meaning"]
"""A key or value that is refused has no fate: it is an error."""


@dataclass(frozen=True, slots=True)
class AutotuningKey:
    """What became of one key."""

    key: str
    fate: Fate
    words: str
    """What it turned into, or why it has no meaning here."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A search as a DeepSpeed configuration asks for it."""

    config: TuneConfig
    enabled: bool
    out: str | None
    """The folder for results; None where the section names none."""
    fresh: bool
    """Whether earlier results in it are thrown away."""
    account: tuple[AutotuningKey, ...]
    """Every key of the section."""


_TUNERS = {"gridsearch": "grid", "random": "random", "model_based": "model"}
_METRICS = {"throughput": "throughput", "latency": "step_time", "flops": "throughput"}
_FAST = ("zero", "micro")
_PARTS = ("forward", "backward", "step")
_NO_MEANING = {
    "arg_mappings": "a trial gets its settings through the run description, not through a script's arguments",
    "exps_dir": "each trial has a folder of its own under the results",
    "metric_path": "a trial's figures are read from its own events",
    "model_info": "nothing has to be profiled first: the plan reads the model itself",
    "model_info_path": "nothing has to be profiled first: the plan reads the model itself",
    "max_train_batch_size": "the global batch is the run's own, and trials only cut it differently",
    "min_train_batch_size": "the global batch is the run's own, and trials only cut it differently",
}
_HONOURED: dict[str, str] = {
    "tuner_early_stopping": "early_stop",
    "tuner_num_trials": "trials",
    "end_profile_step": "steps",
    "max_train_micro_batch_size_per_gpu": "micro_max",
    "min_train_micro_batch_size_per_gpu": "micro_min",
    "num_tuning_micro_batch_sizes": "micro_count",
}
_OTHERS = ("enabled", "fast", "metric", "mp_size", "overwrite", "results_dir", "start_profile_step", "tuner_type")
KEYS = tuple(sorted([*_NO_MEANING, *_HONOURED, *_OTHERS]))
"""Every key that DeepSpeed reads."""


def translate_autotuning(section: Mapping[str, Any], *, nproc: int = 1) -> Translated:
    """The search that an `autotuning` section of a DeepSpeed configuration asks for, with an account of each key.

    A key that DeepSpeed does not know is an error, and so is a value that would silently mean something else. Where the
    section is silent, DeepSpeed's defaults are taken for what it searches, Plait's for the rest.
    """
    settings: dict[str, Any] = {"nproc": nproc, "tuner": "grid", "trials": 50, "early_stop": 5}
    settings |= {"warmup": 2, "steps": 5, "micro_count": 3, "dimensions": _FAST}
    account: list[AutotuningKey] = []
    problems: list[Problem] = []
    for key, value in section.items():
        path = f"autotuning.{key}"
        if key not in KEYS:
            problems.append(Problem(path, "DeepSpeed's autotuner has no such key", choose(key, KEYS, "key")))
            continue
        try:
            changed, entry = _translated(key, value)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        settings |= changed
        account.append(entry)
    problems += _contradictions(settings) if not problems else []
    if problems:
        raise ConfigError(problems)
    return Translated(
        make_tune_config(settings, origin="autotuning"),
        enabled=bool(section.get("enabled", False)),
        out=section.get("results_dir"),
        fresh=bool(section.get("overwrite", False)),
        account=tuple(account),
    )


def _contradictions(settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Two keys, of which one may be DeepSpeed's default, that leave nothing to search."""
    begin, end = settings["warmup"] + 1, settings["steps"]
    if begin > end:
        message = f"{begin}, but `end_profile_step` is {end}: nothing would be measured"
        yield Problem("autotuning.start_profile_step", message, "Let the end come after the start (3 and 5 if absent).")
    least, most = (settings.get(key, TuneConfig.model_fields[key].default) for key in ("micro_min", "micro_max"))
    if least > most:
        message = f"{least}, but `max_train_micro_batch_size_per_gpu` is {most}"
        remedy = "Make the smallest micro-batch no larger than the largest."
        yield Problem("autotuning.min_train_micro_batch_size_per_gpu", message, remedy)


def _translated(key: str, value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    if key in _NO_MEANING:
        return {}, AutotuningKey(key, "without meaning", _NO_MEANING[key])
    if key in _HONOURED:
        return {_HONOURED[key]: _whole(key, value)}, AutotuningKey(key, "honoured", f"{_HONOURED[key]}: {value}")
    return _SPECIAL[key](value)


def _whole(key: str, value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 1:
        raise ConfigError(Problem(f"autotuning.{key}", f"{show(value)} is no count", "Write a whole number from 1."))
    return int(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(
            Problem(f"autotuning.{key}", f"{show(value)} is neither true nor false", "Write one of them.")
        )
    return value


def _enabled(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    return {}, AutotuningKey(
        "enabled", "honoured", "a search is made" if _flag("enabled", value) else "no search is made"
    )


def _fast(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    """Fast, DeepSpeed varies the stage and the micro-batch; otherwise all that it knows, as here all that we know."""
    if _flag("fast", value):
        return {"dimensions": _FAST}, AutotuningKey("fast", "mapped", f"dimensions: {', '.join(_FAST)}")
    return {"dimensions": None}, AutotuningKey("fast", "mapped", "dimensions: all that can pay on the machine")


def _metric(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    if value in _PARTS:
        message = f"{show(value)} is a part of a step, and trials are compared by whole steps"
        raise ConfigError(Problem("autotuning.metric", message, "Write throughput or latency."))
    word = _word("metric", value, _METRICS)
    return {"metric": word}, AutotuningKey("metric", "mapped", f"metric: {word}")


def _tuner(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    word = _word("tuner_type", value, _TUNERS)
    return {"tuner": word}, AutotuningKey("tuner_type", "mapped", f"tuner: {word}")


def _word(key: str, value: Any, words: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise ConfigError(Problem(f"autotuning.{key}", f"{show(value)} is unknown", choose(str(value), words, "word")))
    return words[value]


def _start_step(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    """DeepSpeed measures from this step on, so those before it are the warm-up."""
    warmup = _whole("start_profile_step", value) - 1
    return {"warmup": warmup}, AutotuningKey("start_profile_step", "mapped", f"warmup: {warmup}")


def _mp_size(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    size = _whole("mp_size", value)
    if size == 1:
        return {}, AutotuningKey("mp_size", "honoured", "the model is not cut")
    return {"space": {"strategy.layout.tp": [size]}}, AutotuningKey("mp_size", "mapped", f"strategy.layout.tp: {size}")


def _overwrite(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    words = "earlier results are thrown away" if _flag("overwrite", value) else "an earlier search goes on"
    return {}, AutotuningKey("overwrite", "honoured", words)


def _results_dir(value: Any) -> tuple[dict[str, Any], AutotuningKey]:
    if not isinstance(value, str) or not value:
        raise ConfigError(Problem("autotuning.results_dir", f"{show(value)} is no folder", "Write a path."))
    return {}, AutotuningKey("results_dir", "honoured", f"out: {value}")


_SPECIAL: dict[str, Callable[[Any], tuple[dict[str, Any], AutotuningKey]]] = {
    "enabled": _enabled,
    "fast": _fast,
    "metric": _metric,
    "mp_size": _mp_size,
    "overwrite": _overwrite,
    "results_dir": _results_dir,
    "start_profile_step": _start_step,
    "tuner_type": _tuner,
}
