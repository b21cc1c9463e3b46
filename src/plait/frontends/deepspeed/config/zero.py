"""`zero_optimization`: the stage is honoured; how DeepSpeed moves bytes around is left to `fully_shard`."""

from __future__ import annotations

import os
from typing import Any

from plait.config import show
from plait.frontends.deepspeed.config.work import (
    ANY,
    FLAG,
    PATH,
    SECTION,
    SHARE,
    SIZE,
    TEXT_OR_TEXTS,
    WHOLE,
    Key,
    Table,
    ValueKind,
    Work,
    either,
    group,
    off,
    one_of,
    only,
    refused,
    to,
    unneeded,
)

# Offload and ZeRO-Infinity: `offload_optimizer`, `offload_param`, their old names, and `aio`.


_ZERO = "zero_optimization"
_BUFFERS = "buffers are sized by `strategy.offload.bucket_mb` and `budget_gib`"
_PINNED = "host memory is page-locked wherever the device can use it"
_OVERLAP_COPIES = "reading, writing and updating always overlap"
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


def limit(path: str, kind: ValueKind, why: str) -> Key:
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
    "pipeline_read": unneeded(FLAG, _OVERLAP_COPIES),
    "pipeline_write": unneeded(FLAG, _OVERLAP_COPIES),
    "pipeline": unneeded(FLAG, _OVERLAP_COPIES),
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


OFFLOAD_TABLE: Table = {
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


_BUCKETS = "collectives carry one block of the model each, so there is no bucket to size; the sums are the same"
_GATHER = "how whole parameters are put together again; the values are the same"
_LIVE = "at most two blocks are whole at a time, the one that runs and the next; a limit has nothing to cut"
_OVERLAP = "gradients are reduced beside the backward pass in any case; the sums are the same"
_LAYOUT = "how gradients lie in memory is up to `fully_shard`; the sums are the same"
_PREFETCH = "the next block is always gathered ahead; `strategy.forward_prefetch` gathers more"
_SMALL = "small parameters travel with the block they belong to, so they cost no message of their own"
_CHECKS = "messages and checks of DeepSpeed's own hooks"
_QUANTIZED = "what travels between ranks is not quantized: leave it out"
_GATHERED = "weights are put together whenever a whole model is saved or exported"


def stage(work: Work) -> int:
    """The ZeRO stage that is asked for."""
    value = work.look("zero_optimization")
    if isinstance(value, bool):
        return int(value)
    found = work.look("zero_optimization.stage")
    return int(found) if SIZE.has(found) else 0


def _stage(work: Work, key: str, value: Any) -> None:
    if value > 3:
        work.wrong(key, f"{int(value)} is no stage", "Write 0, 1, 2 or 3.")
        return
    work.put("strategy.zero", int(value), key)
    work.honour(key, value, f"strategy.zero: {int(value)}")


def _secondary(work: Work, key: str, value: Any) -> None:
    """hpZ: parameters are whole within small groups between forward and backward."""
    if value <= 1 or stage(work) != 3:
        work.leave(key, value, "no second sharding" if value <= 1 else "only stage 3 shards parameters")
        return
    work.put("strategy.reshard_after_forward", int(value), key)
    work.map(key, value, f"strategy.reshard_after_forward: {int(value)}")


def _mics(work: Work, key: str, value: Any) -> None:
    """MiCS shards within groups and copies between them: that is what HSDP is."""
    if value < 1:
        work.leave(key, value, "it is off")
        return
    work.put("strategy.layout.dp_shard", int(value), key)
    work.map(key, value, f"strategy.layout.dp_shard: {int(value)} (shards within groups, copies between them)")


STAGES: Table = {
    "stage": Key(SIZE, _stage),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "allgather_size"), unneeded(SIZE, _BUCKETS)),
    **dict.fromkeys(("reduce_scatter", "use_multi_rank_bucket_allreduce", "overlap_comm"), unneeded(FLAG, _OVERLAP)),
    **dict.fromkeys(
        ("contiguous_gradients", "contigious_gradients", "round_robin_gradients", "parameter_alignment"),
        unneeded(FLAG, _LAYOUT),
    ),
    **dict.fromkeys(
        (
            "allgather_partitions",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "allgather_sequential",
        ),
        unneeded(FLAG, _GATHER),
    ),
    **dict.fromkeys(("stage3_prefetch_bucket_size", "prefetch_bucket_size"), limit("prefetch_params", SIZE, _PREFETCH)),
    **dict.fromkeys(("stage3_max_live_parameters", "max_live_parameters"), limit("live_params", SIZE, _LIVE)),
    **dict.fromkeys(
        (
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            "stage3_model_persistence_threshold",
            "model_persistence_threshold",
        ),
        unneeded(SIZE, _LIVE),
    ),
    **dict.fromkeys(
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        limit("persistent_params", SIZE, _SMALL),
    ),
    **dict.fromkeys(
        ("stage3_module_granularity_threshold", "module_granularity_threshold"),
        unneeded(SIZE, "units are the model's blocks, or what `strategy.wrap` names"),
    ),
    **dict.fromkeys(
        (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        unneeded(FLAG, _GATHERED),
    ),
    "sub_group_size": unneeded(SIZE, "the optimizer works through its shard in pieces of its own choice"),
    "compute_grad_norm": unneeded(FLAG, "the norm is always known: the log shows it"),
    "load_from_fp32_weights": only(
        True,
        FLAG,
        "checkpoints hold fp32 weights, and these are loaded",
        "fp32 weights are always loaded: leave it out",
    ),
    "elastic_checkpoint": unneeded(FLAG, "every checkpoint can be resumed on any number of ranks"),
    "ignore_unused_parameters": only(
        True,
        FLAG,
        "parameters without a gradient are left as they are",
        "a parameter that gets no gradient stops nothing: leave it out",
    ),
    "find_unused_parameters": unneeded(FLAG, "parameters without a gradient are left as they are"),
    "legacy_stage1": unneeded(FLAG, "another way to compute the same"),
    "zero_hpz_partition_size": Key(SIZE, _secondary),
    "zero_quantized_weights": off(_QUANTIZED),
    "zero_quantized_gradients": off(_QUANTIZED),
    "zero_quantized_nontrainable_weights": off("frozen weights are not quantized: leave it out"),
    "zeropp_loco_param": refused(SECTION, "DeepSpeed has dropped it too: leave it out"),
    "mics_shard_size": Key(WHOLE, _mics),
    "mics_hierarchical_params_gather": unneeded(FLAG, "groups are chosen by `strategy.layout`"),
    "memory_efficient_linear": unneeded(FLAG, "autograd keeps no second copy of a weight here"),
    "pipeline_loading_checkpoint": unneeded(FLAG, "each rank reads its own part of a checkpoint"),
    "override_module_apply": unneeded(FLAG, "a model is built before it is sharded, so `apply` needs no care"),
    "log_trace_cache_warnings": unneeded(FLAG, _CHECKS),
    "enable_sanity_checks": unneeded(FLAG, _CHECKS),
    "save_muon_momentum_buffer_in_memory": unneeded(FLAG, "where the optimizer's states lie is one choice for all"),
    "leaf_module": group(
        dict.fromkeys(
            ("classes", "names", "name_suffixes"),
            unneeded(TEXT_OR_TEXTS, "a block is gathered as a whole, whatever is inside"),
        )
    ),
    **OFFLOAD_TABLE,
    "zenflow": refused(ANY, "updates wait for no part of the gradient: leave it out"),
}


def _zero(work: Work, key: str, value: Any) -> None:
    if isinstance(value, bool):  # the first form of all: true was stage 1
        work.put("strategy.zero", int(value), key)
        work.map(key, value, f"strategy.zero: {int(value)} (the old form of `stage`)")
    else:
        for name in value:
            if name.startswith("stage3_") and name.removeprefix("stage3_") in value:
                plain = f"{key}.{name.removeprefix('stage3_')}"
                work.wrong(f"{key}.{name}", f"there is `{plain}` too, its other name", "Leave one of the two out.")
        work.walk(key, value, STAGES)
        finish(work)


ZERO_TABLE: Table = {
    "zero_optimization": Key(either(SECTION, FLAG), _zero),
    "allgather_size": unneeded(SIZE, _BUCKETS),
    "aio": group(AIO),
}
