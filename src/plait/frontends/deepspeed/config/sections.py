"""The sections of a DeepSpeed configuration except `optimizer`, `scheduler`, `zero_optimization` and precision.

Parallelism, batch sizes, monitors, recomputing, data, checkpoints, `compile`, and what DeepSpeed has removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import listed, show
from plait.errors import Problem
from plait.frontends import honoured, mapped, refused, refused_unless, unneeded
from plait.frontends.deepspeed.config.keys import (
    ANY,
    COUNT,
    DTYPE,
    FLAG,
    NUMBER,
    PATH,
    SECTION,
    SIZE,
    TEXT,
    TEXTS,
    WHOLE,
    DeepSpeedSettings,
    Key,
    Reader,
    Table,
    ValueType,
    either,
    mapped_if_on,
    one_of,
    refused_if_on,
    same_keys,
    section,
    setting,
    switched_section,
    unsupported_section,
)

_TENSOR_PARALLEL_SIZES = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "tensor_parallel.tensor_parallel.tp_size",
)


def ranks_of_one_sample(settings: DeepSpeedSettings) -> int:
    """Return the number of ranks that compute the same sample together: tensor- times sequence-parallel ranks."""
    count = 1
    for path in (*_TENSOR_PARALLEL_SIZES, "sequence_parallel_size"):
        value = settings.given(path)
        count *= int(value) if COUNT.accepts(value) else 1
    return count


def _axis(axis: str, *, needs: str = "") -> Key:
    """Return a reader for the size of a mesh axis; 0 and 1 set nothing."""

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        if value <= 1:
            settings.unneeded(key, value, "size 1: nothing is sharded")
            return
        path = f"strategy.layout.{axis}"
        if path in settings.sources:
            settings.wrong(
                key, f"{int(value)}, and `{settings.sources[path]}` sets the same size", "Leave one of the two out."
            )
            return
        settings.set(path, int(value), key)
        settings.mapped(key, value, f"{path}: {int(value)}" + (f"; {needs}" if needs else ""))

    return Key(SIZE, read)


def _sequence(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if value == 1:
        settings.unneeded(key, value, "size 1: sequences are not split")
        return
    settings.set("strategy.layout.cp", int(value), key)
    settings.set("strategy.context.kind", "ulysses", key)
    settings.mapped(key, value, f"strategy.layout.cp: {int(value)}, strategy.context.kind: ulysses")


_SAME_RESULT = "it changes the schedule of the computation, not its result"
_OWN_PLAN = "the model's own plan says how each layer is sharded"

_TP: Table = {
    "tp_size": _axis("tp"),
    "tp_grain_size": Key(SIZE, unneeded("layers are sharded evenly")),
    "mpu": Key(ANY, refused("groups of ranks are made from `strategy.layout`: leave it out")),
    "tp_group": Key(ANY, refused("groups of ranks are made from `strategy.layout`: leave it out")),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": _axis("tp"),
    "tp": section(_TP),
    "tensor_parallel": section(_TP),
    "dtype": Key(DTYPE, unneeded("the format is that of `fp16` or `bf16`")),
    "tp_overlap_comm": Key(
        FLAG, unneeded(f"{_SAME_RESULT}; on CUDA `strategy.tensor.async_tp` with `strategy.compile` overlaps")
    ),
    "vocab_parallel_lm_head": Key(FLAG, unneeded(f"{_OWN_PLAN}, the last one too; {_SAME_RESULT}")),
    "vocab_parallel_ce_backend": Key(one_of("torch", "liger"), unneeded("the loss is the same with either")),
    "injection_policy_tuple": Key(
        ANY, refused("write `strategy.tensor.plan`: patterns of module names, and the sharding of each")
    ),
    "partition_config": Key(
        SECTION,
        refused(
            "write `strategy.tensor.plan` instead, for example {layers.*.mlp.up: colwise, layers.*.mlp.down: rowwise}"
        ),
    ),
    "preset_model": Key(TEXT, unneeded(_OWN_PLAN)),
    "keep_module_on_host": Key(FLAG, unneeded("no rank ever holds the whole model: it is built on the meta device")),
    "replace_with_kernel_inject": refused_if_on("kernels of inference are not for training: leave it out"),
    "kernel_inject": refused_if_on("kernels of inference are not for training: leave it out"),
}

_ROUTING = "routing is the model's own: leave it out, and set it in the `model` section"
_EXPERT_PLAN = "experts are found through the model's own plan"

_EXPERT_PARALLEL: Table = {
    "enabled": Key(FLAG, unneeded("`autoep_size` says so")),
    "autoep_size": _axis("ep", needs="the model is Plait's own `moe`"),
    "expert_tensor_parallel_size": Key(
        COUNT, refused_unless("experts are not sharded over `tp`: write 1", 1, why="experts are not sharded")
    ),
    "validate_folding_routing": Key(FLAG, unneeded("a check of DeepSpeed's own")),
    "async_split_plan": Key(FLAG, unneeded(_SAME_RESULT)),
    "use_grouped_mm": Key(FLAG, unneeded(_SAME_RESULT)),
    "disable_triton_grouped_mm": Key(FLAG, unneeded(_SAME_RESULT)),
    "comm_backend": Key(one_of("comm", "deepep"), unneeded(_SAME_RESULT)),
    **same_keys("comm_num_sm comm_qp_margin comm_max_tokens_per_rank", WHOLE, unneeded(_SAME_RESULT)),
    **{
        name: Key(TEXT, unneeded(_SAME_RESULT), auto_is_a_value=True)
        for name in ("combine_impl", "row_weighting_impl", "gate_up_impl", "score_apply")
    },
    **same_keys(
        "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 "
        "num_experts_attr top_k_attr shared_experts_pattern shared_experts_gate_pattern expert_activation",
        TEXT,
        unneeded(_EXPERT_PLAN),
    ),
    "has_shared_experts": Key(FLAG, unneeded(_EXPERT_PLAN)),
    "route_norm": Key(FLAG, refused(_ROUTING)),
    "route_scale": Key(NUMBER, refused_unless(_ROUTING, 1.0, why="1 changes nothing")),
    "routed_scaling_factor": Key(NUMBER, refused(_ROUTING)),
    "score_func": Key(TEXT, refused(_ROUTING)),
    "top_k": Key(COUNT, refused(_ROUTING)),
    "load_balance_coeff": Key(NUMBER, refused(_ROUTING)),
    "num_expert_groups": Key(COUNT, refused(_ROUTING)),
    "num_limited_groups": Key(COUNT, refused(_ROUTING)),
}


def _interval(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if value == 0:
        settings.unneeded(key, value, "nothing is recomputed")
        return
    settings.set("strategy.recompute", "full", key)
    settings.mapped(key, value, "strategy.recompute: full (each block on its own, not groups of several)")


_MODULE = "DeepSpeed reads it nowhere: the arguments of `PipelineModule` say it"
_PIPELINE: Table = {
    "stages": Key(COUNT, unneeded(f"{_MODULE}; in a run description `strategy.layout.pp`")),
    "partition": Key(TEXT, unneeded(f"{_MODULE}; in a run description `strategy.pipeline.split`")),
    "seed_layers": Key(FLAG, unneeded(_MODULE)),
    "activation_checkpoint_interval": Key(SIZE, _interval),
    "pipe_partitioned": Key(FLAG, unneeded("what stages send each other is never split further")),
    "grad_partitioned": Key(FLAG, unneeded("what stages send each other is never split further")),
    "use_reentrant": Key(FLAG, unneeded("recomputation uses hooks instead")),
}

PARALLEL_TABLE: Table = {
    "tensor_parallel": section(_TENSOR_PARALLEL),
    "expert_parallel": switched_section(_EXPERT_PARALLEL, "expert parallelism is"),
    "pipeline": section(_PIPELINE),
    "sequence_parallel_size": Key(COUNT, _sequence),
    "seq_parallel_communication_data_type": Key(
        either(DTYPE, TEXT), unneeded("gradients are summed in one format everywhere, `precision.reduce`")
    ),
    "use_data_before_expert_parallelism": Key(FLAG, unneeded("which ranks share experts does not change the result")),
}

# The batch triad: `train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks`.


TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OPEN = "left open: it follows from the other two and the number of ranks, or is 1"

BATCH_TABLE: Table = {
    TOTAL: setting("batch.total", COUNT, if_auto=_OPEN),
    MICRO: setting("batch.micro", COUNT, if_auto=_OPEN),
    ACCUMULATION: setting("batch.accumulation", COUNT, if_auto=_OPEN),
    "managed_gradient_accumulation": Key(
        FLAG,
        refused_unless(
            "a step always ends after `gradient_accumulation_steps` micro-batches: leave it out",
            True,
            why="micro-batches are counted here too",
        ),
    ),
}


def check_batch_sizes(settings: DeepSpeedSettings, world_size: int | None) -> None:
    """Record a problem if batch sizes contradict each other or the number of processes."""
    sizes = {name: settings.given(name) for name in (TOTAL, MICRO, ACCUMULATION)}
    if not all(value is None or COUNT.accepts(value) for value in sizes.values()) or sizes[TOTAL] is None:
        return
    factors = [name for name in (MICRO, ACCUMULATION) if sizes[name] is not None]
    product = 1
    for name in factors:
        product *= int(sizes[name])
    ranks = None if world_size is None else max(1, world_size // ranks_of_one_sample(settings))
    total = int(sizes[TOTAL])
    terms = [f"{name} {int(sizes[name])}" for name in factors]
    if ranks is not None:
        terms.append(f"{ranks} data-parallel rank{'' if ranks == 1 else 's'}")
    product *= ranks or 1
    exact = ranks is not None and len(factors) == 2
    if total != product if exact else total % product:
        verb = "is not" if exact else "is not a multiple of"
        formula = " × ".join(terms) + (f" = {product}" if len(terms) > 1 else "")
        remedy = f"Leave out one of {listed([TOTAL, *factors])}." if factors else f"Write a multiple of {product}."
        settings.wrong(TOTAL, f"{total} {verb} {formula}", remedy)


# Monitors, timers, profilers, the console.


_FOLDER = "files lie in `work_dir`, under the sink's name"


def _add_sink(name: str) -> Reader:
    """Return a reader that adds a sink to `log.sinks`."""

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        before = settings.sections.get("log", {}).get("sinks", ["jsonl"])
        settings.set("log.sinks", [*before, name], key)

    return read


def _sink_enabled(name: str) -> Key:
    return Key(FLAG, honoured(f"log.sinks: {name}"))


def _file_monitor(name: str) -> Key:
    table: Table = {
        "enabled": _sink_enabled(name),
        "output_path": Key(PATH, unneeded(_FOLDER)),
        "job_name": Key(TEXT, unneeded(_FOLDER)),
    }
    return switched_section(table, "this monitor is", _add_sink(name))


def _by_environment(variable: str) -> Key:
    """Return a reader for a key that has no setting: wandb reads the environment variable."""
    return Key(
        TEXT, lambda settings, key, value: settings.mapped(key, value, f"set {variable}={value}: wandb reads it itself")
    )


_WANDB: Table = {
    "enabled": _sink_enabled("wandb"),
    "project": setting("log.wandb_project", TEXT),
    "team": _by_environment("WANDB_ENTITY"),
    "group": _by_environment("WANDB_RUN_GROUP"),
    "host": _by_environment("WANDB_BASE_URL"),
}
_FLOPS_PROFILED = "`plait profile` measures FLOPs and time by module, and the MFU"
_FLOPS: Table = {
    "enabled": Key(FLAG, mapped(_FLOPS_PROFILED)),
    "recompute_fwd_factor": Key(NUMBER, unneeded("what is recomputed is counted as it runs")),
    "profile_step": Key(COUNT, unneeded("`profile.start` is the first step that `plait profile` records")),
    "module_depth": Key(WHOLE, unneeded(_FLOPS_PROFILED)),
    "top_modules": Key(SIZE, unneeded(_FLOPS_PROFILED)),
    "detailed": Key(FLAG, unneeded(_FLOPS_PROFILED)),
    "output_file": Key(TEXT, unneeded("`plait profile --out FOLDER` writes the figures")),
}
_COMMS_PROFILED = "`plait profile` logs all collectives: bytes, time and bandwidth"
_COMMS: Table = {
    "enabled": Key(FLAG, mapped(_COMMS_PROFILED)),
    **same_keys("prof_all verbose debug", FLAG, unneeded(_COMMS_PROFILED)),
    "prof_ops": Key(TEXTS, unneeded(_COMMS_PROFILED)),
}
_TIMES = "the log has time and memory of a step, and `plait profile` measures where they go"


_NEVER = ValueType("infinite", lambda value: value == float("inf"))


def _steps_per_print(settings: DeepSpeedSettings, key: str, value: float) -> None:
    if _NEVER.accepts(value):  # the value that Accelerate writes to silence DeepSpeed
        settings.unneeded(key, value, "DeepSpeed's own lines are never printed here")
    else:
        settings.set("log.every", int(value), key)
        settings.honoured(key, value, f"log.every: {int(value)}")


MONITORS_TABLE: Table = {
    "steps_per_print": Key(either(COUNT, _NEVER), _steps_per_print),
    "wall_clock_breakdown": mapped_if_on(_TIMES),
    "memory_breakdown": mapped_if_on(_TIMES),
    "dump_state": Key(FLAG, unneeded("every run writes its whole description to `work_dir/config.yaml`")),
    "log_level": Key(ANY, unneeded("`log.console` says how much is shown")),
    "timers": section(
        {
            "throughput": section(
                {
                    "enabled": Key(FLAG, unneeded(_TIMES)),
                    "synchronized": Key(FLAG, unneeded("times are of whole steps")),
                }
            )
        }
    ),
    "tensorboard": _file_monitor("tensorboard"),
    "csv_monitor": _file_monitor("csv"),
    "wandb": switched_section(_WANDB, "this monitor is", _add_sink("wandb")),
    "comet": unsupported_section(
        "Comet is",
        "this sink is not supported: use tensorboard or wandb, or a hook of your own (`hooks`)",
        "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    "flops_profiler": switched_section(_FLOPS, "the profiler is"),
    "comms_logger": switched_section(_COMMS, "the logger is"),
}

# Recomputation, generation, data.


_RECOMPUTE = "the script calls `checkpoint`; in a run description it is `strategy.recompute`"
ACTIVATIONS: Table = {
    "partition_activations": Key(
        FLAG,
        unneeded(
            "`strategy.tensor.sequence_parallel` shards them; without tensor parallelism there is nothing to shard"
        ),
    ),
    "cpu_checkpointing": mapped_if_on(
        "`deepspeed.checkpointing` does so; in a run description `strategy.offload.activations`"
    ),
    "contiguous_memory_optimization": Key(FLAG, unneeded("the allocator is torch's own")),
    "number_checkpoints": Key(SIZE, unneeded(_RECOMPUTE)),
    "synchronize_checkpoint_boundary": Key(FLAG, unneeded("streams synchronize only where they must")),
    "profile": Key(FLAG, unneeded("the log has time and memory of every step")),
}

_OF_HYBRID = "it belongs to the hybrid engine"
_HYBRID: Table = {
    "enabled": Key(
        FLAG, refused("one model trains and generates here: leave it out, and generate with the model itself")
    ),
    **same_keys("max_out_tokens inference_tp_size tp_gather_partition_size", COUNT, unneeded(_OF_HYBRID)),
    **same_keys("release_inference_cache pin_parameters enable_cuda_graph", FLAG, unneeded(_OF_HYBRID)),
}


OTHERS_TABLE: Table = {
    "activation_checkpointing": section(ACTIVATIONS),
    "hybrid_engine": switched_section(_HYBRID, "the hybrid engine is"),
    "dataloader_drop_last": mapped_if_on(
        "the loader of `initialize` does so; in a run description write `data.drop_last: true`",
        if_off="the last, smaller batch is kept",
    ),
    "data_efficiency": unsupported_section(
        "data efficiency is",
        "samples are read whole and in one order: sort or truncate the data beforehand",
        "seed data_sampling data_routing",
    ),
    "weight_quantization": unsupported_section("quantization is", "weights are trained as they are: leave it out"),
    "disable_python_gc": Key(FLAG, unneeded("it changes no result")),
    "vocabulary_size": Key(COUNT, unneeded("DeepSpeed only warns about it; the `model` section has its own")),
}

# `checkpoint` and `datastates_ckpt`: how state is saved.


_WRITING = "each rank writes its own shards, at the speed of the disk"
_BACKGROUND = "checkpoint.async_save: true (state is copied, and written while training continues)"


def _datastates(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if value is False:
        settings.unneeded(key, value, "it is off")
    else:
        settings.set("checkpoint.async_save", True, key)
        settings.mapped(key, value, _BACKGROUND)


_WRITER_KEYS: Table = {
    "type": Key(
        one_of("mock", "python", "fast"), refused_unless("mock would write nothing", "python", "fast", why=_WRITING)
    ),
    "decoupled": mapped_if_on(
        _BACKGROUND, "checkpoint.async_save", if_off="checkpoints are written before training resumes"
    ),
    "io_buffer_size": Key(SIZE, unneeded(_WRITING)),
    "io_buffer_double": Key(FLAG, unneeded(_WRITING)),
    "io_multiplier": Key(COUNT, unneeded(_WRITING)),
    "show_statistics": Key(FLAG, unneeded("the log has the duration of every checkpoint")),
    "data_parallel": Key(one_of("replica", "socket", "machine"), unneeded(_WRITING)),
}
_CHECKPOINT: Table = {
    "tag_validation": Key(one_of("ignore", "warn", "fail"), unneeded("ranks always agree on the name of a checkpoint")),
    "load_universal": Key(FLAG, unneeded("every checkpoint can be resumed in any other layout")),
    "use_node_local_storage": setting("checkpoint.node_local", FLAG),
    "checkpoint_serialization": Key(FLAG, unneeded(_WRITING)),
    "parallel_write": section({"pipeline_stage": Key(FLAG, unneeded(_WRITING))}),
    "writer": section(_WRITER_KEYS),
}

CHECKPOINTS_TABLE: Table = {"checkpoint": section(_CHECKPOINT), "datastates_ckpt": Key(ANY, _datastates)}

# `compile`: DeepCompile is torch.compile with additional compiler passes.


_GRAPH = "it belongs to passes of DeepCompile's own"


_COMPILE: Table = {
    "deepcompile": mapped_if_on(
        "strategy.compile: true (blocks are compiled, and sharded one by one)", "strategy.compile"
    ),
    "offload_activation": mapped_if_on("strategy.offload.activations: all", "strategy.offload.activations", "all"),
    "offload_opt_states": refused_if_on("write `zero_optimization.offload_optimizer`"),
    "offload_parameters": refused_if_on("write `zero_optimization.offload_param`"),
    "passes": Key(TEXTS, refused("leave it out: tensor and sequence parallelism are axes of `strategy.layout`")),
    **same_keys(
        "autoep_non_moe free_activation offload_activation_pin_memory double_buffer symmetric_memory "
        "debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors",
        FLAG,
        unneeded(_GRAPH),
    ),
    "free_activation_threshold": Key(SIZE, unneeded(_GRAPH)),
}

COMPILING_TABLE: Table = {"compile": section(_COMPILE)}

# Names and features that DeepSpeed has removed. Their keys have outcomes too.


OLD_NAMES = {
    "bfloat16": "bf16",
    "gradient_accumulation": "gradient_accumulation_steps",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""Former names of top-level keys, and wrong ones that are often written."""

REMOVED_TABLE: Table = {
    "nebula": unsupported_section(
        "Nebula is",
        "write `checkpoint.async_save: true` in the run description",
        "persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path",
    ),
    "compression_training": unsupported_section(
        "compression is", "models are trained as they are: compress them afterwards"
    ),
    "quantize_training": unsupported_section("quantization is", "weights are trained as they are: leave it out"),
    "eigenvalue": unsupported_section(
        "eigenvalues are",
        "they were for quantization, which is not supported: leave it out",
        "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    "sparse_attention": unsupported_section("sparse attention is", "attention is the model's own: leave it out"),
    "sparse_gradients": unsupported_section("sparse gradients are", "gradients of embeddings are dense: leave it out"),
    "elasticity": unsupported_section(
        "elasticity is",
        "write `train_batch_size`, and start with `plait launch --elastic_training`: it stays the same at any size",
        "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version prefer_larger_batch "
        "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
    ),
    "graph_harvesting": unsupported_section("graph harvesting is", "write `strategy.compile: {mode: reduce-overhead}`"),
    "curriculum_learning": unsupported_section(
        "the curriculum is",
        "samples are read whole and in one order: sort or truncate the data beforehand",
        "curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    "progressive_layer_drop": unsupported_section(
        "layer dropping is", "layers are never dropped: leave it out", "theta gamma"
    ),
}


def renamed(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return the configuration with current names, renamed keys (new → old), and a problem for each key given twice."""
    names: dict[str, str] = {}
    problems = []
    current: dict[str, Any] = {}
    for key, value in config.items():
        new = OLD_NAMES.get(key, key)
        if new != key and new in config:
            message = f"{show(value)} is an old name of `{new}`, which is there too"
            problems.append(Problem(key, message, "Leave out the old one."))
            continue
        if new != key:
            names[new] = key
        current[new] = value
    return current, names, problems
