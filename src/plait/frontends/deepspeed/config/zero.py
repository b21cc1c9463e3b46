"""`zero_optimization`: the stage is honoured; how DeepSpeed moves bytes around is left to `fully_shard`."""

from __future__ import annotations

from typing import Any

from plait.frontends.deepspeed.config import offload
from plait.frontends.deepspeed.config.keys import group, off, only, refused, unneeded
from plait.frontends.deepspeed.config.kinds import ANY, FLAG, SECTION, SIZE, TEXT_OR_TEXTS, WHOLE, either
from plait.frontends.deepspeed.config.work import Key, Table, Work

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
    **dict.fromkeys(
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size"), offload.limit("prefetch_params", SIZE, _PREFETCH)
    ),
    **dict.fromkeys(("stage3_max_live_parameters", "max_live_parameters"), offload.limit("live_params", SIZE, _LIVE)),
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
        offload.limit("persistent_params", SIZE, _SMALL),
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
    **offload.TABLE,
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
        offload.finish(work)


TABLE: Table = {
    "zero_optimization": Key(either(SECTION, FLAG), _zero),
    "allgather_size": unneeded(SIZE, _BUCKETS),
    "aio": group(offload.AIO),
}
