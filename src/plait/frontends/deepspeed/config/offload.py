"""Offload and ZeRO-Infinity: `offload_optimizer`, `offload_param`, their old names, and `aio`."""

from __future__ import annotations

import os
from typing import Any

from plait.config import show
from plait.frontends.deepspeed.config.keys import to, unneeded
from plait.frontends.deepspeed.config.kinds import ANY, FLAG, PATH, SECTION, SHARE, SIZE, Kind, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work

_ZERO = "zero_optimization"
_BUFFERS = "buffers are sized by `strategy.offload.bucket_mb` and `budget_gib`"
_PINNED = "host memory is page-locked wherever the device can use it"
_OVERLAP = "reading, writing and updating always overlap"
_PIECES = "which pieces a file is read in is up to the file layer: requests are aligned, several in flight"


def tier(work: Work, what: str) -> str:
    """Where the `optimizer` or the `param`eters of this run are to live: none, cpu or nvme."""
    device = work.look(f"{_ZERO}.offload_{what}.device")
    old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
    plural = what == "param" and work.on(f"{_ZERO}.cpu_offload_params")
    if device is None and (work.on(f"{_ZERO}.{old}") or plural):
        return "cpu"
    return str(device).lower() if device is not None else "none"


def _parameters_move(work: Work) -> bool:
    """Only stage 3 has parameters that are not in use."""
    return tier(work, "param") != "none" and work.look(f"{_ZERO}.stage") == 3


def _device(what: str, path: str) -> Key:
    def act(work: Work, key: str, value: str) -> None:
        word = value.lower()
        if word == "none":
            work.leave(key, value, "nothing is offloaded")
        elif what == "param" and not _parameters_move(work):
            work.leave(key, value, "below stage 3 weights stay on the device, in DeepSpeed too")
        else:
            work.put(path, word, key)
            work.honour(key, value, f"{path}: {word}")

    return Key(one_of("none", "cpu", "nvme"), act)


def _old_switch(what: str, path: str) -> Key:
    """`cpu_offload: true` came before `offload_optimizer: {device: cpu}`."""

    def act(work: Work, key: str, value: bool) -> None:
        new = f"{_ZERO}.offload_{what}"
        if work.look(new) is not None:
            work.wrong(key, f"{show(value)} is the old form of `{new}`, which is there too", "Leave out the old one.")
        elif not value:
            work.leave(key, value, "nothing is offloaded")
        elif what == "param" and not _parameters_move(work):
            work.leave(key, value, "below stage 3 weights stay on the device, in DeepSpeed too")
        else:
            work.put(path, "cpu", key)
            work.map(key, value, f"{path}: cpu (the old form of `{new}`)")

    return Key(FLAG, act)


def _path(what: str) -> Key:
    def act(work: Work, key: str, value: Any) -> None:
        if tier(work, what) != "nvme" or (what == "param" and not _parameters_move(work)):
            work.leave(key, value, "the device is not nvme")
            return
        value = os.fspath(value)
        path = "strategy.offload.path"
        before = work.sources.get(path)
        if before is not None and work.sections["strategy"]["offload"]["path"] != value:
            message = f"{value!r}, but `{before}` is {os.fspath(work.look(before))!r}"
            work.wrong(key, message, "Write one folder: all files of a run lie in one.")
            return
        work.put(path, value, key)
        work.honour(key, value, f"{path}: {value}")

    return Key(PATH, act)


def _ratio(work: Work, key: str, value: float) -> None:
    if tier(work, "optimizer") == "none":
        work.leave(key, value, "nothing is offloaded")
    elif _parameters_move(work):
        work.leave(key, value, "the weights live on the host, and so does their update")
    elif value == 1:
        work.honour(key, value, "all of the update is offloaded")
    elif value == 0:
        work.wrong(key, "0 offloads nothing, but `device` asks for it", "Write `device: none`, or more than 0.")
    else:
        work.put("strategy.offload.ratio", round(1 - value, 9), key)
        work.honour(key, value, f"strategy.offload.ratio: {1 - value:g} (the share that stays on the device)")


def limit(path: str, kind: Kind, why: str) -> Key:
    """A limit of weights that are offloaded; where none are, there is nothing that it could limit."""
    there = to(f"strategy.offload.{path}", kind)

    def act(work: Work, key: str, value: Any) -> None:
        if _parameters_move(work) and value > 0:
            there.act(work, key, value)
        else:
            work.leave(key, value, why)

    return Key(kind, act)


_OPTIMIZER: Table = {
    "device": _device("optimizer", "strategy.offload.optimizer"),
    "nvme_path": _path("optimizer"),
    "ratio": Key(SHARE, _ratio),
    "buffer_count": unneeded(SIZE, _BUFFERS),
    "pin_memory": unneeded(FLAG, _PINNED),
    "pipeline_read": unneeded(FLAG, _OVERLAP),
    "pipeline_write": unneeded(FLAG, _OVERLAP),
    "pipeline": unneeded(FLAG, _OVERLAP),
    "fast_init": unneeded(FLAG, "files are written once, as they are first needed"),
    "super_offload": unneeded(FLAG, "updates start as soon as gradients are there, on any machine"),
    "cpuadam_cores_perc": unneeded(SHARE, "torch's threads are used as they are set"),
}
_PARAM: Table = {
    "device": _device("param", "strategy.offload.params"),
    "nvme_path": _path("param"),
    "max_in_cpu": unneeded(SIZE, "`stage3_max_live_parameters` limits what is in memory of weights in files"),
    "buffer_count": unneeded(SIZE, _BUFFERS),
    "buffer_size": unneeded(SIZE, _BUFFERS),
    "pin_memory": unneeded(FLAG, _PINNED),
}


def _section(table: Table) -> Key:
    return Key(SECTION, lambda work, key, value: work.walk(key, value, table))


TABLE: Table = {
    "offload_optimizer": _section(_OPTIMIZER),
    "offload_param": _section(_PARAM),
    "cpu_offload": _old_switch("optimizer", "strategy.offload.optimizer"),
    "cpu_offload_param": _old_switch("param", "strategy.offload.params"),
    "cpu_offload_params": _old_switch("param", "strategy.offload.params"),
    "cpu_offload_use_pin_memory": unneeded(FLAG, _PINNED),
}

AIO: Table = {
    "block_size": unneeded(SIZE, _PIECES),
    "queue_depth": unneeded(SIZE, _PIECES),
    "thread_count": unneeded(SIZE, _PIECES),
    "intra_op_parallelism": unneeded(SIZE, _PIECES),
    "single_submit": unneeded(FLAG, _PIECES),
    "overlap_events": unneeded(FLAG, _PIECES),
    "use_gds": unneeded(ANY, "files pass through host memory; the result is the same"),
}


def finish(work: Work) -> None:
    """Weights that are offloaded take the optimizer with them, for it updates them where they are."""
    path = "strategy.offload.optimizer"
    if "strategy.offload.params" in work.sources and path not in work.sources:
        key, word = f"{_ZERO}.offload_optimizer", tier(work, "param")
        work.put(path, word, key)
        work.imply(key, f"{path}: {word} (weights are updated where they live)")
