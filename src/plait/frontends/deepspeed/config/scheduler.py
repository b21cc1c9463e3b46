"""`scheduler`: DeepSpeed's five schedules have the same names and keys in `schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import choose, show
from plait.frontends.deepspeed.config.keys import only, to
from plait.frontends.deepspeed.config.kinds import COUNT, FLAG, NUMBER, SECTION, SIZE, TEXT, WHOLE, Kind, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work

_OPEN = "left open: as the script sets it, or the default"


def _keys(kind: Kind, *names: str) -> dict[str, Key]:
    return {name: to(f"schedule.{name}", kind, if_open=_OPEN) for name in names}


def _warmup_steps(work: Work, key: str, value: Any) -> None:
    """DeepSpeed's warm-up is two steps long at least, so 0 and 1 are the same to it."""
    length = max(1, int(value))
    work.put("schedule.warmup_num_steps", length, key)
    work.honour(key, value, f"schedule.warmup_num_steps: {length}")


_LENGTHS = {
    "warmup_num_steps": Key(SIZE, _warmup_steps, _OPEN),
    "total_num_steps": to("schedule.total_num_steps", COUNT, if_open="left open: the length of the run"),
}
_RISE = {
    **_keys(NUMBER, "warmup_min_lr", "warmup_max_lr"),
    **_keys(one_of("log", "linear"), "warmup_type"),
    "warmup_num_steps": _LENGTHS["warmup_num_steps"],
    "last_batch_iteration": only(
        -1, WHOLE, "a run starts at its first step", "a run goes on where its checkpoint ends: leave it out"
    ),
}
TYPES: dict[str, Table] = {
    "WarmupLR": _RISE,
    "WarmupDecayLR": {**_RISE, "total_num_steps": _LENGTHS["total_num_steps"]},
    "WarmupCosineLR": {
        **_LENGTHS,
        **_keys(NUMBER, "warmup_min_ratio", "cos_min_ratio"),
        "warmup_type": _RISE["warmup_type"],
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
    "OneCycle": {
        **_keys(NUMBER, "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_mom_rate"),
        **_keys(NUMBER, "cycle_min_mom", "cycle_max_mom"),
        **_keys(COUNT, "cycle_first_step_size", "cycle_second_step_size"),
        **_keys(SIZE, "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"),
        **_keys(FLAG, "cycle_momentum"),
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
    "LRRangeTest": {
        **_keys(NUMBER, "lr_range_test_min_lr", "lr_range_test_step_rate"),
        **_keys(COUNT, "lr_range_test_step_size"),
        **_keys(FLAG, "lr_range_test_staircase"),
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
}
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_momentum", True),
}
"""Defaults of DeepSpeed that are not Plait's."""
_NEEDED = {"OneCycle": ("cycle_min_lr", "cycle_max_lr")}


def _type(work: Work, key: str, value: str) -> None:
    if value in TYPES:
        work.put("schedule.type", value, key)
        work.honour(key, value, f"schedule.type: {value}")
    else:
        remedy = choose(value, TYPES, "schedule")
        work.refuse(key, value, f"{remedy} Any other: give it to `initialize` as `lr_scheduler`, or write `schedule`.")


def _params(work: Work, key: str, value: dict[str, Any]) -> None:
    table = TYPES.get(str(work.look("scheduler.type")))
    if table is not None:
        others = {name: _with(name) for name in value if name not in table and _with(name)}
        for name, types in others.items():
            remedy = f"{' and '.join(types)} {'have' if len(types) > 1 else 'has'} it: change `type`, or leave it out."
            work.wrong(f"{key}.{name}", f"{work.look('scheduler.type')} has no such key", remedy)
        work.walk(key, {name: each for name, each in value.items() if name not in others}, table)
    else:
        work.leave(key, value, "it belongs to a schedule that is refused")


def _with(name: str) -> list[str]:
    """The schedules that have a key."""
    return [word for word, table in TYPES.items() if name in table]


_SCHEDULER: Table = {"type": Key(TEXT, _type), "params": Key(SECTION, _params)}


def _scheduler(work: Work, key: str, value: dict[str, Any]) -> None:
    word = work.look("scheduler.type")
    if word is None:
        work.wrong("scheduler.type", "there is none, and DeepSpeed would then build no schedule", "Write WarmupLR.")
    work.walk(key, value, _SCHEDULER)
    if not isinstance(word, str) or word not in TYPES:
        return
    for name in _NEEDED.get(word, ()):
        if work.look(f"scheduler.params.{name}") is None:
            work.wrong(f"scheduler.params.{name}", f"{word} needs it", "Write a rate.")
    name, default = _DEFAULTS.get(word, ("", None))
    params = value.get("params")
    if name and not (isinstance(params, Mapping) and params.get(name) is not None):  # `auto` is the optimizer's rate
        work.put(f"schedule.{name}", default, f"scheduler.params.{name}")
        work.imply(f"scheduler.params.{name}", f"schedule.{name}: {show(default)} is DeepSpeed's default")


TABLE: Table = {"scheduler": Key(SECTION, _scheduler)}
