"""What is written down while training: monitors, timers, profilers, the console."""

from __future__ import annotations

from typing import Any

from plait.frontends.deepspeed.config.keys import gone, group, switched, to, unneeded
from plait.frontends.deepspeed.config.kinds import (
    ANY,
    COUNT,
    FLAG,
    NUMBER,
    PATH,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Kind,
    either,
)
from plait.frontends.deepspeed.config.work import Act, Key, Table, Work

_FOLDER = "files lie in `work_dir`, under the sink's name"


def _sink(name: str) -> Act:
    """Write to one more place besides the run's own journal."""

    def act(work: Work, key: str, value: Any) -> None:
        before = work.sections.get("log", {}).get("sinks", ["jsonl"])
        work.put("log.sinks", [*before, name], key)

    return act


def _on(name: str) -> Key:
    return Key(FLAG, lambda work, key, value: work.honour(key, value, f"log.sinks: {name}"))


def _files(name: str) -> Key:
    table: Table = {"enabled": _on(name), "output_path": unneeded(PATH, _FOLDER), "job_name": unneeded(TEXT, _FOLDER)}
    return switched(table, "this monitor is", _sink(name))


def _by_environment(variable: str) -> Key:
    """wandb has words of its own for it, which it reads itself."""
    return Key(TEXT, lambda work, key, value: work.map(key, value, f"set {variable}={value}: wandb reads it itself"))


_WANDB: Table = {
    "enabled": _on("wandb"),
    "project": to("log.wandb_project", TEXT),
    "team": _by_environment("WANDB_ENTITY"),
    "group": _by_environment("WANDB_RUN_GROUP"),
    "host": _by_environment("WANDB_BASE_URL"),
}
_COUNTED = "`plait profile` measures FLOPs and time by module, and the MFU"
_FLOPS: Table = {
    "enabled": Key(FLAG, lambda work, key, value: work.map(key, value, _COUNTED)),
    "recompute_fwd_factor": unneeded(NUMBER, "what is recomputed is counted as it runs"),
    "profile_step": unneeded(COUNT, "`profile.start` is the first step that `plait profile` records"),
    "module_depth": unneeded(WHOLE, _COUNTED),
    "top_modules": unneeded(SIZE, _COUNTED),
    "detailed": unneeded(FLAG, _COUNTED),
    "output_file": unneeded(TEXT, "`plait profile --out FOLDER` writes the figures"),
}
_TRAFFIC = "`plait profile` has a log of all messages: bytes, time and bandwidth"
_COMMS: Table = {
    "enabled": Key(FLAG, lambda work, key, value: work.map(key, value, _TRAFFIC)),
    **dict.fromkeys(("prof_all", "verbose", "debug"), unneeded(FLAG, _TRAFFIC)),
    "prof_ops": unneeded(TEXTS, _TRAFFIC),
}
_TIMES = "the log has time and memory of a step, and `plait profile` measures where they go"


def _parts(work: Work, key: str, value: bool) -> None:
    if value:
        work.map(key, value, _TIMES)
    else:
        work.leave(key, value, "it is off")


_NEVER = Kind("infinite", lambda value: value == float("inf"))


def _lines(work: Work, key: str, value: float) -> None:
    if _NEVER.has(value):  # so Accelerate silences DeepSpeed
        work.leave(key, value, "DeepSpeed's own lines are never printed here")
    else:
        work.put("log.every", int(value), key)
        work.honour(key, value, f"log.every: {int(value)}")


TABLE: Table = {
    "steps_per_print": Key(either(COUNT, _NEVER), _lines),
    "wall_clock_breakdown": Key(FLAG, _parts),
    "memory_breakdown": Key(FLAG, _parts),
    "dump_state": unneeded(FLAG, "every run writes its whole description to `work_dir/config.yaml`"),
    "log_level": unneeded(ANY, "`log.console` says how much is shown"),
    "timers": group(
        {
            "throughput": group(
                {"enabled": unneeded(FLAG, _TIMES), "synchronized": unneeded(FLAG, "times are of whole steps")}
            )
        }
    ),
    "tensorboard": _files("tensorboard"),
    "csv_monitor": _files("csv"),
    "wandb": switched(_WANDB, "this monitor is", _sink("wandb")),
    "comet": gone(
        "Comet is",
        "there is no such sink: use tensorboard or wandb, or a hook of your own (`hooks`)",
        "samples_log_interval",
        "project",
        "workspace",
        "api_key",
        "experiment_name",
        "experiment_key",
        "online",
        "mode",
    ),
    "flops_profiler": switched(_FLOPS, "the profiler is"),
    "comms_logger": switched(_COMMS, "the logger is"),
}
