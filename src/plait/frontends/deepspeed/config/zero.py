"""Translates `zero_optimization`: stage and offload are honoured; `fully_shard` decides buckets and communication."""

from __future__ import annotations

import os
from typing import Any

from plait.config import show
from plait.frontends import refused, refused_unless, unneeded
from plait.frontends.deepspeed.config.keys import (
    ANY,
    FLAG,
    PATH,
    SECTION,
    SHARE,
    SIZE,
    TEXT_OR_TEXTS,
    WHOLE,
    DeepSpeedSettings,
    Key,
    Table,
    either,
    one_of,
    refused_if_on,
    same_keys,
    section,
    setting,
)

# Offload and ZeRO-Infinity: `offload_optimizer`, `offload_param`, their old names, and `aio`.


_ZERO = "zero_optimization"
_BUFFERS = "buffers are sized by `strategy.offload.bucket_mb` and `budget_gib`"
_PINNED = "host memory is page-locked wherever the device can use it"
_OVERLAP_COPIES = "reading, writing and updating always overlap"
_IO_REQUESTS = "the file layer chooses its requests itself: aligned, several in flight"


def offload_device(settings: DeepSpeedSettings, role: str) -> str:
    """Return the device that a role (`optimizer` or `param`) is offloaded to: `none`, `cpu` or `nvme`."""
    device = settings.given(f"{_ZERO}.offload_{role}.device")
    old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[role]
    plural = role == "param" and settings.is_on(f"{_ZERO}.cpu_offload_params")
    if device is None and (settings.is_on(f"{_ZERO}.{old}") or plural):
        return "cpu"
    return str(device).lower() if device is not None else "none"


def _offloads_params(settings: DeepSpeedSettings) -> bool:
    """Whether parameters are offloaded; only at stage 3, where those that are not in use can be."""
    return offload_device(settings, "param") != "none" and settings.given(f"{_ZERO}.stage") == 3


def _device(role: str, path: str) -> Key:
    def read(settings: DeepSpeedSettings, key: str, value: str) -> None:
        device = value.lower()
        if device == "none":
            settings.unneeded(key, value, "nothing is offloaded")
        elif role == "param" and not _offloads_params(settings):
            settings.unneeded(key, value, "below stage 3 weights stay on the device, in DeepSpeed too")
        else:
            settings.set(path, device, key)
            settings.honoured(key, value, f"{path}: {device}")

    return Key(one_of("none", "cpu", "nvme"), read)


def _old_switch(role: str, path: str) -> Key:
    """Return a reader for `cpu_offload: true`, the old form of `offload_optimizer: {device: cpu}`."""

    def read(settings: DeepSpeedSettings, key: str, value: bool) -> None:
        new = f"{_ZERO}.offload_{role}"
        if settings.given(new) is not None:
            settings.wrong(
                key, f"{show(value)} is the old form of `{new}`, which is given too", "Leave out the old one."
            )
        elif not value:
            settings.unneeded(key, value, "nothing is offloaded")
        elif role == "param" and not _offloads_params(settings):
            settings.unneeded(key, value, "below stage 3 weights stay on the device, in DeepSpeed too")
        else:
            settings.set(path, "cpu", key)
            settings.mapped(key, value, f"{path}: cpu (the old form of `{new}`)")

    return Key(FLAG, read)


def _path(role: str) -> Key:
    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        if offload_device(settings, role) != "nvme" or (role == "param" and not _offloads_params(settings)):
            settings.unneeded(key, value, "the device is not nvme")
            return
        value = os.fspath(value)
        path = "strategy.offload.path"
        before = settings.sources.get(path)
        if before is not None and settings.sections["strategy"]["offload"]["path"] != value:
            message = f"{value!r}, but `{before}` is {os.fspath(settings.given(before))!r}"
            settings.wrong(key, message, "Write one folder: all files of a run are in one.")
            return
        settings.set(path, value, key)
        settings.honoured(key, value, f"{path}: {value}")

    return Key(PATH, read)


def _ratio(settings: DeepSpeedSettings, key: str, value: float) -> None:
    if offload_device(settings, "optimizer") == "none":
        settings.unneeded(key, value, "nothing is offloaded")
    elif _offloads_params(settings):
        settings.unneeded(key, value, "the weights live on the host, and so does their update")
    elif value == 1:
        settings.honoured(key, value, "all of the update is offloaded")
    elif value == 0:
        settings.wrong(key, "0 offloads nothing, but `device` asks for it", "Write `device: none`, or more than 0.")
    else:
        settings.set("strategy.offload.ratio", round(1 - value, 9), key)
        settings.honoured(key, value, f"strategy.offload.ratio: {1 - value:g} (the share that stays on the device)")


def _offload_limit(path: str, why: str) -> Key:
    """Return a reader for a limit of offloaded weights; it is unneeded if none are offloaded."""
    limit = setting(f"strategy.offload.{path}", SIZE)

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        if _offloads_params(settings) and value > 0:
            limit(settings, key, value)
        else:
            settings.unneeded(key, value, why)

    return Key(SIZE, read)


_OPTIMIZER: Table = {
    "device": _device("optimizer", "strategy.offload.optimizer"),
    "nvme_path": _path("optimizer"),
    "ratio": Key(SHARE, _ratio),
    "buffer_count": Key(SIZE, unneeded(_BUFFERS)),
    "pin_memory": Key(FLAG, unneeded(_PINNED)),
    "pipeline_read": Key(FLAG, unneeded(_OVERLAP_COPIES)),
    "pipeline_write": Key(FLAG, unneeded(_OVERLAP_COPIES)),
    "pipeline": Key(FLAG, unneeded(_OVERLAP_COPIES)),
    "fast_init": Key(FLAG, unneeded("files are written once, as they are first needed")),
    "super_offload": Key(FLAG, unneeded("updates start as soon as gradients are there, on any machine")),
    "cpuadam_cores_perc": Key(SHARE, unneeded("torch's threads are used as they are set")),
}
_PARAM: Table = {
    "device": _device("param", "strategy.offload.params"),
    "nvme_path": _path("param"),
    "max_in_cpu": Key(SIZE, unneeded("`stage3_max_live_parameters` limits what is in memory of weights in files")),
    "buffer_count": Key(SIZE, unneeded(_BUFFERS)),
    "buffer_size": Key(SIZE, unneeded(_BUFFERS)),
    "pin_memory": Key(FLAG, unneeded(_PINNED)),
}


OFFLOAD_TABLE: Table = {
    "offload_optimizer": section(_OPTIMIZER),
    "offload_param": section(_PARAM),
    "cpu_offload": _old_switch("optimizer", "strategy.offload.optimizer"),
    "cpu_offload_param": _old_switch("param", "strategy.offload.params"),
    "cpu_offload_params": _old_switch("param", "strategy.offload.params"),
    "cpu_offload_use_pin_memory": Key(FLAG, unneeded(_PINNED)),
}

AIO: Table = {
    "block_size": Key(SIZE, unneeded(_IO_REQUESTS)),
    "queue_depth": Key(SIZE, unneeded(_IO_REQUESTS)),
    "thread_count": Key(SIZE, unneeded(_IO_REQUESTS)),
    "intra_op_parallelism": Key(SIZE, unneeded(_IO_REQUESTS)),
    "single_submit": Key(FLAG, unneeded(_IO_REQUESTS)),
    "overlap_events": Key(FLAG, unneeded(_IO_REQUESTS)),
    "use_gds": Key(ANY, unneeded("files pass through host memory; the result is the same")),
}


def _offload_optimizer_with_params(settings: DeepSpeedSettings) -> None:
    """If parameters are offloaded, offload the optimizer too: it updates weights where they are stored."""
    path = "strategy.offload.optimizer"
    if "strategy.offload.params" in settings.sources and path not in settings.sources:
        key, device = f"{_ZERO}.offload_optimizer", offload_device(settings, "param")
        settings.set(path, device, key)
        settings.implied(key, f"{path}: {device} (weights are updated where they are)")


_BUCKETS = "collectives carry one block of the model each, so there is no bucket to size; the sums are the same"
_GATHER = "how parameters are gathered; the values are the same"
_LIVE = "at most two blocks are gathered at a time, the one that runs and the next"
_OVERLAP = "gradient reduction always overlaps the backward pass; the sums are the same"
_LAYOUT = "how gradients lie in memory is up to `fully_shard`; the sums are the same"
_PREFETCH = "the next block is always gathered ahead; `strategy.forward_prefetch` gathers more"
_SMALL = "small parameters are gathered with their block, not by a collective of their own"
_CHECKS = "messages and checks of DeepSpeed's own hooks"
_QUANTIZED = "communication is not quantized: leave it out"
_GATHERED = "weights are gathered whenever a whole model is saved or exported"


def _requested_stage(settings: DeepSpeedSettings) -> int:
    value = settings.given("zero_optimization")
    if isinstance(value, bool):
        return int(value)
    stage = settings.given("zero_optimization.stage")
    return int(stage) if SIZE.accepts(stage) else 0


def _stage(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if value > 3:
        settings.wrong(key, f"{int(value)} is not a stage", "Write 0, 1, 2 or 3.")
        return
    settings.set("strategy.zero", int(value), key)
    settings.honoured(key, value, f"strategy.zero: {int(value)}")


def _hpz(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Translate hpZ: between forward and backward, parameters are sharded within small groups of ranks only."""
    if value <= 1 or _requested_stage(settings) != 3:
        settings.unneeded(key, value, "no secondary partition" if value <= 1 else "only stage 3 shards parameters")
        return
    settings.set("strategy.reshard_after_forward", int(value), key)
    settings.mapped(key, value, f"strategy.reshard_after_forward: {int(value)}")


def _mics(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Translate MiCS, which is HSDP: sharding within groups of ranks, replicas between them."""
    if value < 1:
        settings.unneeded(key, value, "it is off")
        return
    settings.set("strategy.layout.dp_shard", int(value), key)
    settings.mapped(key, value, f"strategy.layout.dp_shard: {int(value)} (shards within groups, copies between them)")


STAGES: Table = {
    "stage": Key(SIZE, _stage),
    **same_keys("reduce_bucket_size allgather_bucket_size allgather_size", SIZE, unneeded(_BUCKETS)),
    **same_keys("reduce_scatter use_multi_rank_bucket_allreduce overlap_comm", FLAG, unneeded(_OVERLAP)),
    **same_keys(
        "contiguous_gradients contigious_gradients round_robin_gradients parameter_alignment", FLAG, unneeded(_LAYOUT)
    ),
    **same_keys(
        "allgather_partitions stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential allgather_sequential",
        FLAG,
        unneeded(_GATHER),
    ),
    **dict.fromkeys(
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size"), _offload_limit("prefetch_params", _PREFETCH)
    ),
    **dict.fromkeys(("stage3_max_live_parameters", "max_live_parameters"), _offload_limit("live_params", _LIVE)),
    **same_keys(
        "stage3_max_reuse_distance max_reuse_distance stage3_model_persistence_threshold model_persistence_threshold",
        SIZE,
        unneeded(_LIVE),
    ),
    **dict.fromkeys(
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        _offload_limit("persistent_params", _SMALL),
    ),
    **same_keys(
        "stage3_module_granularity_threshold module_granularity_threshold",
        SIZE,
        unneeded("units are the model's blocks, or what `strategy.wrap` names"),
    ),
    **same_keys(
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        FLAG,
        unneeded(_GATHERED),
    ),
    "sub_group_size": Key(SIZE, unneeded("the optimizer works through its shard in pieces of its own choice")),
    "compute_grad_norm": Key(FLAG, unneeded("the norm is always known: the log shows it")),
    "load_from_fp32_weights": Key(
        FLAG,
        refused_unless(
            "fp32 weights are always loaded: leave it out",
            True,
            why="checkpoints hold fp32 weights, and these are loaded",
        ),
    ),
    "elastic_checkpoint": Key(FLAG, unneeded("every checkpoint can be resumed on any number of ranks")),
    "ignore_unused_parameters": Key(
        FLAG,
        refused_unless(
            "a parameter that gets no gradient stops nothing: leave it out",
            True,
            why="parameters without a gradient are left as they are",
        ),
    ),
    "find_unused_parameters": Key(FLAG, unneeded("parameters without a gradient are left as they are")),
    "legacy_stage1": Key(FLAG, unneeded("another way to compute the same")),
    "zero_hpz_partition_size": Key(SIZE, _hpz),
    "zero_quantized_weights": refused_if_on(_QUANTIZED),
    "zero_quantized_gradients": refused_if_on(_QUANTIZED),
    "zero_quantized_nontrainable_weights": refused_if_on("frozen weights are not quantized: leave it out"),
    "zeropp_loco_param": Key(SECTION, refused("DeepSpeed has dropped it too: leave it out")),
    "mics_shard_size": Key(WHOLE, _mics),
    "mics_hierarchical_params_gather": Key(FLAG, unneeded("groups are chosen by `strategy.layout`")),
    "memory_efficient_linear": Key(FLAG, unneeded("autograd keeps no second copy of a weight here")),
    "pipeline_loading_checkpoint": Key(FLAG, unneeded("each rank reads its own part of a checkpoint")),
    "override_module_apply": Key(FLAG, unneeded("a model is built before it is sharded, so `apply` needs no care")),
    "log_trace_cache_warnings": Key(FLAG, unneeded(_CHECKS)),
    "enable_sanity_checks": Key(FLAG, unneeded(_CHECKS)),
    "save_muon_momentum_buffer_in_memory": Key(FLAG, unneeded("all states of the optimizer are in one place")),
    "leaf_module": section(
        same_keys(
            "classes names name_suffixes",
            TEXT_OR_TEXTS,
            unneeded("a block is gathered as a whole, with all its modules"),
        )
    ),
    **OFFLOAD_TABLE,
    "zenflow": Key(ANY, refused("updates are not made asynchronous: leave it out")),
}


def _zero(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if isinstance(value, bool):  # the oldest form, in which true means stage 1
        settings.set("strategy.zero", int(value), key)
        settings.mapped(key, value, f"strategy.zero: {int(value)} (the old form of `stage`)")
    else:
        for name in value:
            if name.startswith("stage3_") and name.removeprefix("stage3_") in value:
                plain = f"{key}.{name.removeprefix('stage3_')}"
                settings.wrong(f"{key}.{name}", f"`{plain}`, its other name, is given too", "Leave one of the two out.")
        settings.read(value, STAGES, key)
        _offload_optimizer_with_params(settings)


ZERO_TABLE: Table = {
    "zero_optimization": Key(either(SECTION, FLAG), _zero),
    "allgather_size": Key(SIZE, unneeded(_BUCKETS)),
    "aio": section(AIO),
}
