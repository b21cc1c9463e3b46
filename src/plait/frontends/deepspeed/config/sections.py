"""Sections that spread one model, or one sample, over several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import listed, show
from plait.errors import Problem
from plait.frontends.deepspeed.config.work import (
    ANY,
    COUNT,
    FLAG,
    FORMAT,
    NUMBER,
    PATH,
    SECTION,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    Act,
    Key,
    Table,
    ValueKind,
    Work,
    either,
    gone,
    group,
    off,
    one_of,
    only,
    refused,
    switched,
    to,
    unneeded,
)

_TENSOR = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size")


def ranks_of_one_sample(work: Work) -> int:
    """How many ranks work on the same sample: those are no data-parallel ranks."""
    count = 1
    for path in (*_TENSOR, "sequence_parallel_size"):
        value = work.look(path)
        count *= int(value) if COUNT.has(value) else 1
    return count


def _axis(axis: str, *, needs: str = "") -> Key:
    """The size of a mesh axis; 0 and 1 leave it alone."""

    def act(work: Work, key: str, value: Any) -> None:
        if value <= 1:
            work.leave(key, value, "one rank alone: nothing is cut")
            return
        path = f"strategy.layout.{axis}"
        if path in work.sources:
            work.wrong(key, f"{int(value)} says again what `{work.sources[path]}` says", "Leave one of the two out.")
            return
        work.put(path, int(value), key)
        work.map(key, value, f"{path}: {int(value)}" + (f"; {needs}" if needs else ""))

    return Key(SIZE, act)


def _sequence(work: Work, key: str, value: Any) -> None:
    if value == 1:
        work.leave(key, value, "one rank alone: sequences are whole")
        return
    work.put("strategy.layout.cp", int(value), key)
    work.put("strategy.context.kind", "ulysses", key)
    work.map(key, value, f"strategy.layout.cp: {int(value)}, strategy.context.kind: ulysses")


_SAME = "the result is the same, only who computes it when differs"
_OWN_PLAN = "the model's own plan says how each layer is cut"

_TP: Table = {
    "tp_size": _axis("tp"),
    "tp_grain_size": unneeded(SIZE, "layers are cut evenly"),
    "mpu": refused(ANY, "groups of ranks are made from `strategy.layout`: leave it out"),
    "tp_group": refused(ANY, "groups of ranks are made from `strategy.layout`: leave it out"),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": _axis("tp"),
    "tp": group(_TP),
    "tensor_parallel": group(_TP),
    "dtype": unneeded(FORMAT, "the format is that of `fp16` or `bf16`"),
    "tp_overlap_comm": unneeded(FLAG, f"{_SAME}; on CUDA `strategy.tensor.async_tp` with `strategy.compile` overlaps"),
    "vocab_parallel_lm_head": unneeded(FLAG, f"{_OWN_PLAN}, the last one too; {_SAME}"),
    "vocab_parallel_ce_backend": unneeded(one_of("torch", "liger"), "the loss is the same with either"),
    "injection_policy_tuple": refused(
        ANY, "write `strategy.tensor.plan`: patterns of module names and how each is cut"
    ),
    "partition_config": refused(
        SECTION,
        "write `strategy.tensor.plan` instead, for example {layers.*.mlp.up: colwise, layers.*.mlp.down: rowwise}",
    ),
    "preset_model": unneeded(TEXT, _OWN_PLAN),
    "keep_module_on_host": unneeded(FLAG, "no rank ever holds the whole model: it is built on the meta device"),
    "replace_with_kernel_inject": off("kernels of inference are not for training: leave it out"),
    "kernel_inject": off("kernels of inference are not for training: leave it out"),
}

_ROUTING = "routing is the model's own: leave it out, and set it in the `model` section"
_FOUND = "experts are found through the model's own plan"

_EXPERT_PARALLEL: Table = {
    "enabled": unneeded(FLAG, "`autoep_size` says so"),
    "autoep_size": _axis("ep", needs="the model is Plait's own `moe`"),
    "expert_tensor_parallel_size": only(1, COUNT, "experts are whole", "experts are not cut over `tp`: write 1"),
    "validate_folding_routing": unneeded(FLAG, "a check of DeepSpeed's own"),
    "async_split_plan": unneeded(FLAG, _SAME),
    "use_grouped_mm": unneeded(FLAG, _SAME),
    "disable_triton_grouped_mm": unneeded(FLAG, _SAME),
    "comm_backend": unneeded(one_of("comm", "deepep"), _SAME),
    **dict.fromkeys(("comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"), unneeded(WHOLE, _SAME)),
    **{
        name: Key(TEXT, lambda w, k, v: w.leave(k, v, _SAME), knows_auto=True)
        for name in ("combine_impl", "row_weighting_impl", "gate_up_impl", "score_apply")
    },
    **dict.fromkeys(
        (
            "preset_model",
            "moe_layer_pattern",
            "expert_pattern",
            "router_pattern",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "num_experts_attr",
            "top_k_attr",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
            "expert_activation",
        ),
        unneeded(TEXT, _FOUND),
    ),
    "has_shared_experts": unneeded(FLAG, _FOUND),
    "route_norm": refused(FLAG, _ROUTING),
    "route_scale": only(1.0, NUMBER, "1 changes nothing", _ROUTING),
    "routed_scaling_factor": refused(NUMBER, _ROUTING),
    "score_func": refused(TEXT, _ROUTING),
    "top_k": refused(COUNT, _ROUTING),
    "load_balance_coeff": refused(NUMBER, _ROUTING),
    "num_expert_groups": refused(COUNT, _ROUTING),
    "num_limited_groups": refused(COUNT, _ROUTING),
}


def _interval(work: Work, key: str, value: Any) -> None:
    if value == 0:
        work.leave(key, value, "nothing is recomputed")
        return
    work.put("strategy.recompute", "full", key)
    work.map(key, value, "strategy.recompute: full (each block by itself, not chunks of several)")


_MODULE = "DeepSpeed reads it nowhere: the arguments of `PipelineModule` say it"
_PIPELINE: Table = {
    "stages": unneeded(COUNT, f"{_MODULE}; in a run description `strategy.layout.pp`"),
    "partition": unneeded(TEXT, f"{_MODULE}; in a run description `strategy.pipeline.split`"),
    "seed_layers": unneeded(FLAG, _MODULE),
    "activation_checkpoint_interval": Key(SIZE, _interval),
    "pipe_partitioned": unneeded(FLAG, "what travels between the parts is never cut further"),
    "grad_partitioned": unneeded(FLAG, "what travels between the parts is never cut further"),
    "use_reentrant": unneeded(FLAG, "recomputing does not go through it"),
}

PARALLEL_TABLE: Table = {
    "tensor_parallel": group(_TENSOR_PARALLEL),
    "expert_parallel": switched(_EXPERT_PARALLEL, "expert parallelism is"),
    "pipeline": group(_PIPELINE),
    "sequence_parallel_size": Key(COUNT, _sequence),
    "seq_parallel_communication_data_type": unneeded(
        either(FORMAT, TEXT), "gradients are summed in one format everywhere, `precision.reduce`"
    ),
    "use_data_before_expert_parallelism": unneeded(FLAG, "which ranks share experts does not change the result"),
}

# The batch triad: `train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks`.


TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OPEN = "left open: it follows from the other two and the number of ranks, or is 1"

BATCH_TABLE: Table = {
    TOTAL: to("batch.total", COUNT, if_open=_OPEN),
    MICRO: to("batch.micro", COUNT, if_open=_OPEN),
    ACCUMULATION: to("batch.accumulation", COUNT, if_open=_OPEN),
    "managed_gradient_accumulation": only(
        True,
        FLAG,
        "micro-batches are counted here too",
        "a step always ends after `gradient_accumulation_steps` micro-batches: leave it out",
    ),
}


def check(work: Work) -> None:
    """Find sizes that cannot be made to agree, whatever comes later."""
    sizes = {name: work.look(name) for name in (TOTAL, MICRO, ACCUMULATION)}
    if not all(value is None or COUNT.has(value) for value in sizes.values()) or sizes[TOTAL] is None:
        return
    factors = [name for name in (MICRO, ACCUMULATION) if sizes[name] is not None]
    product = 1
    for name in factors:
        product *= int(sizes[name])
    ranks = None if work.world_size is None else max(1, work.world_size // ranks_of_one_sample(work))
    total = int(sizes[TOTAL])
    words = [f"{name} {int(sizes[name])}" for name in factors]
    if ranks is not None:
        words.append(f"{ranks} data-parallel rank{'' if ranks == 1 else 's'}")
    product *= ranks or 1
    exact = ranks is not None and len(factors) == 2
    if total != product if exact else total % product:
        verb = "is not" if exact else "is no multiple of"
        sum_ = " × ".join(words) + (f" = {product}" if len(words) > 1 else "")
        remedy = f"Leave out one of {listed([TOTAL, *factors])}." if factors else f"Write a multiple of {product}."
        work.wrong(TOTAL, f"{total} {verb} {sum_}", remedy)


# What is written down while training: monitors, timers, profilers, the console.


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


_NEVER = ValueKind("infinite", lambda value: value == float("inf"))


def _lines(work: Work, key: str, value: float) -> None:
    if _NEVER.has(value):  # so Accelerate silences DeepSpeed
        work.leave(key, value, "DeepSpeed's own lines are never printed here")
    else:
        work.put("log.every", int(value), key)
        work.honour(key, value, f"log.every: {int(value)}")


MONITORS_TABLE: Table = {
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

# What fits into no larger section: recomputing, generating, data.


def _on_host(work: Work, key: str, value: bool) -> None:
    if value:
        work.map(key, value, "`deepspeed.checkpointing` does so; in a run description `strategy.offload.activations`")
    else:
        work.leave(key, value, "it is off")


_RECOMPUTE = "the script says what is recomputed; in a run description `strategy.recompute` does"
ACTIVATIONS: Table = {
    "partition_activations": unneeded(
        FLAG, "with tensor parallelism `strategy.tensor.sequence_parallel` spreads them; alone there is nothing to cut"
    ),
    "cpu_checkpointing": Key(FLAG, _on_host),
    "contiguous_memory_optimization": unneeded(FLAG, "the allocator is torch's own"),
    "number_checkpoints": unneeded(SIZE, _RECOMPUTE),
    "synchronize_checkpoint_boundary": unneeded(FLAG, "streams wait for each other only where they must"),
    "profile": unneeded(FLAG, "the log has time and memory of every step"),
}

_OF_HYBRID = "it belongs to the hybrid engine"
_HYBRID: Table = {
    "enabled": refused(FLAG, "one model trains and generates here: leave it out, and generate with the model itself"),
    **dict.fromkeys(("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"), unneeded(COUNT, _OF_HYBRID)),
    **dict.fromkeys(("release_inference_cache", "pin_parameters", "enable_cuda_graph"), unneeded(FLAG, _OF_HYBRID)),
}


def _drop_last(work: Work, key: str, value: bool) -> None:
    if value:
        work.map(key, value, "the loader of `initialize` does so; in a run description write `data.drop_last: true`")
    else:
        work.leave(key, value, "the last, smaller batch is kept")


OTHERS_TABLE: Table = {
    "activation_checkpointing": group(ACTIVATIONS),
    "hybrid_engine": switched(_HYBRID, "the hybrid engine is"),
    "dataloader_drop_last": Key(FLAG, _drop_last),
    "data_efficiency": gone(
        "data efficiency is",
        "samples come in one order, whole: sort or cut the data beforehand",
        "seed",
        "data_sampling",
        "data_routing",
    ),
    "weight_quantization": gone("quantization is", "weights are trained as they are: leave it out"),
    "disable_python_gc": unneeded(FLAG, "it changes no result"),
    "vocabulary_size": unneeded(COUNT, "DeepSpeed only warns about it; the `model` section has its own"),
}

# `checkpoint` and `datastates_ckpt`: how state is saved.


_WRITING = "each rank writes its own shards, at the speed of the disk"
_BACKGROUND = "checkpoint.async_save: true (state is copied, and written while training goes on)"


def _decoupled(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("checkpoint.async_save", True, key)
        work.map(key, value, _BACKGROUND)
    else:
        work.leave(key, value, "checkpoints are written before training goes on")


def _datastates(work: Work, key: str, value: Any) -> None:
    if value is False:
        work.leave(key, value, "it is off")
    else:
        work.put("checkpoint.async_save", True, key)
        work.map(key, value, _BACKGROUND)


_WRITER: Table = {
    "type": only(("python", "fast"), one_of("mock", "python", "fast"), _WRITING, "mock would write nothing"),
    "decoupled": Key(FLAG, _decoupled),
    "io_buffer_size": unneeded(SIZE, _WRITING),
    "io_buffer_double": unneeded(FLAG, _WRITING),
    "io_multiplier": unneeded(COUNT, _WRITING),
    "show_statistics": unneeded(FLAG, "the log says how long a checkpoint took"),
    "data_parallel": unneeded(one_of("replica", "socket", "machine"), _WRITING),
}
_CHECKPOINT: Table = {
    "tag_validation": unneeded(one_of("ignore", "warn", "fail"), "ranks always agree on the name of a checkpoint"),
    "load_universal": unneeded(FLAG, "every checkpoint can be resumed in any other layout"),
    "use_node_local_storage": to("checkpoint.node_local", FLAG),
    "checkpoint_serialization": unneeded(FLAG, _WRITING),
    "parallel_write": group({"pipeline_stage": unneeded(FLAG, _WRITING)}),
    "writer": group(_WRITER),
}

CHECKPOINTS_TABLE: Table = {"checkpoint": group(_CHECKPOINT), "datastates_ckpt": Key(ANY, _datastates)}

# `compile`: DeepCompile is torch.compile with passes of its own.


_GRAPH = "it belongs to passes of DeepCompile's own"


def _deepcompile(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("strategy.compile", True, key)
        work.map(key, value, "strategy.compile: true (blocks are compiled, and sharded one by one)")
    else:
        work.leave(key, value, "it is off")


def _activations(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("strategy.offload.activations", "all", key)
        work.map(key, value, "strategy.offload.activations: all")
    else:
        work.leave(key, value, "it is off")


_COMPILE: Table = {
    "deepcompile": Key(FLAG, _deepcompile),
    "offload_activation": Key(FLAG, _activations),
    "offload_opt_states": off("write `zero_optimization.offload_optimizer`"),
    "offload_parameters": off("write `zero_optimization.offload_param`"),
    "passes": refused(TEXTS, "leave it out: tensor and sequence parallelism are axes of `strategy.layout`"),
    **dict.fromkeys(
        (
            "autoep_non_moe",
            "free_activation",
            "offload_activation_pin_memory",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
        ),
        unneeded(FLAG, _GRAPH),
    ),
    "free_activation_threshold": unneeded(SIZE, _GRAPH),
}

COMPILING_TABLE: Table = {"compile": group(_COMPILE)}

# Names and features that DeepSpeed itself has given up. Each still gets an answer.


OLD_NAMES = {
    "bfloat16": "bf16",
    "gradient_accumulation": "gradient_accumulation_steps",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""Names of top-level keys that were right once, or are often written."""

REMOVED_TABLE: Table = {
    "nebula": gone(
        "Nebula is",
        "write `checkpoint.async_save: true` in the run description",
        "persistent_storage_path",
        "persistent_time_interval",
        "num_of_version_in_retention",
        "enable_nebula_load",
        "load_path",
    ),
    "compression_training": gone("compression is", "models are trained as they are: compress them afterwards"),
    "quantize_training": gone("quantization is", "weights are trained as they are: leave it out"),
    "eigenvalue": gone(
        "eigenvalues are",
        "they were for quantization, which is not there: leave it out",
        "verbose",
        "max_iter",
        "tol",
        "stability",
        "gas_boundary_resolution",
        "layer_name",
        "layer_num",
    ),
    "sparse_attention": gone("sparse attention is", "attention is the model's own: leave it out"),
    "sparse_gradients": gone("sparse gradients are", "gradients of embeddings are dense: leave it out"),
    "elasticity": gone(
        "elasticity is",
        "write `train_batch_size`, and start with `plait launch --elastic_training`: it stays the same at any size",
        "max_train_batch_size",
        "micro_batch_sizes",
        "min_gpus",
        "max_gpus",
        "min_time",
        "version",
        "prefer_larger_batch",
        "ignore_non_elastic_batch_info",
        "num_gpus_per_node",
        "model_parallel_size",
    ),
    "graph_harvesting": gone("graph harvesting is", "write `strategy.compile: {mode: reduce-overhead}`"),
    "curriculum_learning": gone(
        "the curriculum is",
        "samples come in one order, whole: sort or cut the data beforehand",
        "curriculum_type",
        "min_difficulty",
        "max_difficulty",
        "schedule_type",
        "schedule_config",
    ),
    "progressive_layer_drop": gone("layer dropping is", "layers are never dropped: leave it out", "theta", "gamma"),
}


def renamed(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """The configuration under today's names; for each of those its old one; and what stands there under both."""
    names: dict[str, str] = {}
    problems = []
    found: dict[str, Any] = {}
    for key, value in config.items():
        new = OLD_NAMES.get(key, key)
        if new != key and new in config:
            message = f"{show(value)} is an old name of `{new}`, which is there too"
            problems.append(Problem(key, message, "Leave out the old one."))
            continue
        if new != key:
            names[new] = key
        found[new] = value
    return found, names, problems
