"""Rules for `strategy.engine`: settings that another library does not support, and keys of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plait.config.engines import (
    ENGINES,
    CustomEngine,
    EngineTraits,
    as_fp16_section,
    config_value,
    engine_stage,
    not_honoured,
)
from plait.config.rules.facts import RunFacts, keys_set, without_effect
from plait.config.run import RunConfig
from plait.config.text import choose, listed, show
from plait.errors import Problem

_NATIVE = "Use `engine: native`, or leave it out."
_OFFLOAD = {"strategy.offload.optimizer": "offload_optimizer", "strategy.offload.params": "offload_param"}
"""Plait's keys → DeepSpeed's, of `zero_optimization`."""
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")

PASSED_ON = (
    "zero_optimization",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "data_types",
    "aio",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
"""Top-level keys of a DeepSpeed configuration that reach DeepSpeed as they are."""

ANSWERED_HERE = {
    "train_batch_size": "batch.total",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "train.clip_norm",
    "optimizer": "optim",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",
    "steps_per_print": "log.every",
}
"""Keys that repeat keys of the run description; they may be given, with the same value."""

REFUSED = {
    "scheduler": ("Plait sets the learning rate", "Write it as `schedule`."),
    "amp": ("DeepSpeed no longer supports Apex", "Write `precision: bf16` or `fp16`."),
    "tensorboard": ("Plait writes the events of the run", "Write `log.sinks: [jsonl, tensorboard]`."),
    "wandb": ("Plait writes the events of the run", "Write `log.sinks: [jsonl, wandb]`."),
    "csv_monitor": ("Plait writes the events of the run", "Write `log.sinks: [jsonl, csv]`."),
    "checkpoint": ("checkpoints are Plait's with every engine", "Write it as `checkpoint` of the run."),
    "activation_checkpointing": (
        "it applies only to models that call DeepSpeed's function",
        "Write `strategy.recompute`.",
    ),
    "autotuning": ("it starts runs of its own", "Use `plait tune`."),
    "elasticity": ("DeepSpeed has removed it", "Leave it out: a Plait checkpoint resumes on any number of ranks."),
    "compression_training": ("DeepSpeed has removed it", "Leave it out."),
    "sparse_attention": ("DeepSpeed has removed it", "Leave it out."),
    "hybrid_engine": ("this engine trains only", "Leave it out."),
    "pipeline": ("this engine has data parallelism only", "Use `engine: native` with `strategy.layout.pp`."),
    "tensor_parallel": ("this engine has data parallelism only", "Use `engine: native` with `strategy.layout.tp`."),
    "expert_parallel": ("this engine has data parallelism only", "Use `engine: native` with `strategy.layout.ep`."),
    "curriculum_learning": ("Plait defines the order of samples", "Leave it out."),
    "data_efficiency": ("Plait defines the order of samples", "Leave it out."),
    "compile": ("DeepCompile is not supported", "Use `engine: native` with `strategy.compile`."),
    "torch_autocast": ("`precision` sets the dtypes", "Write `precision: bf16` or `fp16`."),
    "sparse_gradients": ("checkpoints have no sparse state", "Leave it out."),
}
"""Keys of DeepSpeed that are refused: why, and what to write."""

COLOSSALAI_OWNED = {
    "precision": "precision.compute",
    "mixed_precision": "precision",
    "max_norm": "train.clip_norm",
    "norm_type": "train.clip_norm",
    "cast_inputs": "precision.cast_inputs",
    "master_weights": "precision.master",
    "initial_scale": "precision.scaler",
    "tp_size": "strategy.layout.tp",
    "pp_size": "strategy.layout.pp",
    "sp_size": "strategy.layout.cp",
    "extra_dp_size": "strategy.layout",
    "enable_gradient_accumulation": "batch.accumulation",
    "custom_policy": "strategy.layout",
    "broadcast_buffers": "strategy.plugin",
}
"""Options of ColossalAI's plugins that Plait sets."""


def engine_options_need_their_engine(facts: RunFacts) -> Iterator[Problem]:
    """`config` and `plugin` are options of another library."""
    strategy = facts.config.strategy
    if strategy.engine == "native":
        reason = "`strategy.engine` is native"
        yield from without_effect(
            "strategy", strategy, ("config", "plugin"), reason, "Leave it out, or name an `engine`."
        )
    if strategy.engine == "deepspeed":
        reason = "`strategy.engine` is deepspeed, and plugins belong to colossalai"
        yield from without_effect("strategy", strategy, ("plugin",), reason, "Leave it out.")
    if strategy.engine == "colossalai" and strategy.plugin is None:
        remedy = "Write `plugin: low_level_zero`, `gemini`, `hybrid`, `torch_ddp` or `torch_fsdp`."
        yield Problem("strategy.plugin", "colossalai needs one", remedy)


def engines_act_on_what_is_set(facts: RunFacts) -> Iterator[Problem]:
    """A key that the engine does not support is refused. Custom engines declare their keys once they are loaded."""
    engine = facts.config.strategy.engine
    if not isinstance(engine, CustomEngine):
        yield from unsupported(facts.config, engine, ENGINES[engine].traits)


def unsupported(config: RunConfig, name: str, traits: EngineTraits) -> Iterator[Problem]:
    """Yield a problem for each key that was set and that an engine does not support."""
    for path, value in not_honoured(config, traits):
        theirs = _OFFLOAD.get(path) if name == "deepspeed" else None
        remedy = f"Write `config: {{zero_optimization: {{{theirs}: {{device: {value}}}}}}}`." if theirs else _NATIVE
        yield Problem(path, f"{show(value)} is not supported by engine {name}", remedy)


def libraries_are_given_whole_models(facts: RunFacts) -> Iterator[Problem]:
    """Other libraries shard a model over all ranks, in their own units."""
    strategy = facts.config.strategy
    name = strategy.engine
    if isinstance(name, CustomEngine) or name == "native":
        return
    if (strategy.layout.dp_replicate or 1) > 1 and (strategy.layout.dp_shard or 1) > 1:
        message = f"{strategy.layout.dp_replicate}: engine {name} does not support replicas of a sharded model"
        yield Problem("strategy.layout.dp_replicate", message, _NATIVE)
    mode, allowed = strategy.recompute.mode, name == "deepspeed" or strategy.plugin == "torch_ddp"
    if mode == "auto" or (mode != "none" and not allowed):
        remedy = "Write `full`, `every` or `selective`." if allowed else _NATIVE
        yield Problem("strategy.recompute.mode", f"{mode} is not supported by engine {name}", remedy)
    if mode == "none":
        for key in keys_set(strategy.wrap, "classes", "names", "min_params"):
            yield Problem(f"strategy.wrap.{key}", f"engine {name} chooses its own wrap units", _NATIVE)


def libraries_have_fewer_ways_to_update(facts: RunFacts) -> Iterator[Problem]:
    """The update is the library's, which supports fewer optimizers."""
    config = facts.config
    name = config.strategy.engine
    if isinstance(name, CustomEngine) or name == "native":
        return
    if config.optim.type not in _OPTIMIZERS:
        message = f"{config.optim.type} is not supported by engine {name}"
        yield Problem("optim.type", message, f"Use {listed(_OPTIMIZERS, 'or')}.")
    if name == "deepspeed" and not config.train.guard.enabled:
        message = "false: DeepSpeed always skips steps that are not finite"
        yield Problem("train.guard.enabled", message, _NATIVE)


def stages_agree(facts: RunFacts) -> Iterator[Problem]:
    """`strategy.zero` and the engine's own key name the same stage."""
    strategy = facts.config.strategy
    if strategy.engine == "native" or strategy.zero is None:
        return
    stage = engine_stage(strategy.engine, strategy.plugin, strategy.config)
    if stage is not None and stage != strategy.zero:
        where = "strategy.plugin" if strategy.plugin in ("gemini", "torch_ddp", "torch_fsdp") else "strategy.config"
        message = f"{strategy.zero}, but `{where}` sets stage {stage}"
        yield Problem("strategy.zero", message, "Leave one of the two out.")


def deepspeed_keys_are_known(facts: RunFacts) -> Iterator[Problem]:
    """DeepSpeed ignores an unknown key; here it is an error."""
    strategy = facts.config.strategy
    if strategy.engine != "deepspeed":
        return
    for key in strategy.config or {}:
        if key in REFUSED:
            reason, remedy = REFUSED[key]
            yield Problem(f"strategy.config.{key}", reason, remedy)
        elif key not in PASSED_ON and key not in ANSWERED_HERE:
            known = (*PASSED_ON, *ANSWERED_HERE)
            yield Problem(f"strategy.config.{key}", "unknown key of engine deepspeed", choose(key, known, "key"))
    zero = config_value(strategy.config, "zero_optimization")
    for key in ("zenflow", "zenflow_config", "mics_shard_size", "elastic_checkpoint"):
        if config_value(zero, key) is not None:
            reason = "corrupts weights in 0.19.8" if "zenflow" in key else "is not supported"
            yield Problem(f"strategy.config.zero_optimization.{key}", f"{key} {reason}", "Leave it out.")


def deepspeed_and_the_run_agree(facts: RunFacts) -> Iterator[Problem]:
    """Values that both configurations have must be equal."""
    config = facts.config
    if config.strategy.engine != "deepspeed":
        return
    theirs = config.strategy.config
    for path, theirs_value, key, ours in _repeated(theirs, config):
        if theirs_value is not None and theirs_value != ours:
            message = f"{show(theirs_value)}, but `{key}` is {show(ours)}; both mean the same"
            yield Problem(f"strategy.config.{path}", message, f"Leave it out, or write `{key}: {show(theirs_value)}`.")
    params = config_value(theirs, "optimizer", "params")
    for key in params if isinstance(params, Mapping) else ():
        if key not in type(config.optim).model_fields:
            remedy = f"Leave it out: DeepSpeed gets Plait's optimizer {config.optim.type}."
            yield Problem(f"strategy.config.optimizer.params.{key}", f"`optim` has no {key}", remedy)


def _repeated(theirs: Mapping[str, Any] | None, config: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield each setting that both configurations have: path and value in the library's, key and value in Plait's."""
    batch, train, precision, optim = config.batch, config.train, config.precision, config.optim
    yield "train_batch_size", config_value(theirs, "train_batch_size"), "batch.total", batch.total
    micro = config_value(theirs, "train_micro_batch_size_per_gpu")
    yield "train_micro_batch_size_per_gpu", micro, "batch.micro", batch.micro
    steps = config_value(theirs, "gradient_accumulation_steps")
    yield "gradient_accumulation_steps", steps, "batch.accumulation", batch.accumulation
    clip = config_value(theirs, "gradient_clipping")
    yield "gradient_clipping", clip, "train.clip_norm", train.clip_norm or (0.0 if clip == 0 else None)
    yield "steps_per_print", config_value(theirs, "steps_per_print"), "log.every", config.log.every
    for section in ("fp16", "bf16", "bfloat16"):
        dtype = "bf16" if section == "bfloat16" else section
        enabled = config_value(theirs, section, "enabled")
        if enabled is not None and bool(enabled) != (precision.compute == dtype):
            yield f"{section}.enabled", enabled, "precision.compute", precision.compute
    for key, ours in as_fp16_section(precision.scaler).items():
        yield f"fp16.{key}", config_value(theirs, "fp16", key), "precision.scaler", ours
    optimizer = config_value(theirs, "optimizer", "type")
    if optimizer is not None and str(optimizer).lower() != optim.type.lower():
        yield "optimizer.type", optimizer, "optim.type", optim.type
    for key in ("lr", "betas", "eps", "weight_decay", "momentum"):
        value = config_value(theirs, "optimizer", "params", key)
        if value is not None and hasattr(optim, key):
            ours = getattr(optim, key)
            yield f"optimizer.params.{key}", tuple(value) if key == "betas" else value, f"optim.{key}", ours


def colossalai_plugins_have_their_limits(facts: RunFacts) -> Iterator[Problem]:
    """Each plugin supports some stages and dtypes, and gets some options from the run description."""
    config, strategy = facts.config, facts.config.strategy
    if strategy.engine != "colossalai":
        return
    for key in strategy.config or {}:
        if key in COLOSSALAI_OWNED:
            message = f"the run description sets it: `{COLOSSALAI_OWNED[key]}`"
            yield Problem(f"strategy.config.{key}", message, "Leave it out.")
    plugin, stage, compute = strategy.plugin, strategy.stage, config.precision.compute
    if compute == "fp16":
        message = "fp16: colossalai's loss scaler differs from `precision.scaler`"
        yield Problem("precision.compute", message, "Write `bf16`, or use another engine.")
    if plugin == "low_level_zero" and stage not in (1, 2):
        yield Problem("strategy.zero", f"{stage}: low_level_zero has the stages 1 and 2", "Write `strategy.zero: 2`.")
    if plugin == "hybrid" and stage == 3:
        yield Problem("strategy.zero", "3: hybrid has the stages 0, 1 and 2", "Write `strategy.zero: 2`.")
    if compute in ("fp32", "tf32") and (plugin == "gemini" or (plugin == "hybrid" and stage > 0)):
        message = f"{compute}: {plugin} at stage {stage} supports 16-bit dtypes only"
        yield Problem("precision.compute", message, "Write `bf16`, or `plugin: low_level_zero`.")
    if plugin == "gemini" and (config.batch.accumulation or 1) > 1:
        message = f"{config.batch.accumulation}: gemini supports one micro-batch per step"
        yield Problem("batch.accumulation", message, "Leave it out, or use `plugin: low_level_zero`.")
    if plugin == "gemini" and config.optim.type not in ("AdamW", "Adam"):
        message = f"{config.optim.type}: gemini supports ColossalAI's own Adam only"
        yield Problem("optim.type", message, "Use AdamW or Adam.")


def stage_zero_adds_in_the_format_of_compute(facts: RunFacts) -> Iterator[Problem]:
    """DeepSpeed without ZeRO reduces gradients in their dtype, and its fp16 scaler has no hysteresis."""
    config = facts.config
    compute = config.precision.compute
    if config.strategy.engine != "deepspeed" or config.strategy.stage > 0 or compute in ("fp32", "tf32"):
        return
    if compute == "fp16":
        message = "fp16: DeepSpeed's loss scaler at stage 0 differs from `precision.scaler`"
        yield Problem("precision.compute", message, "Write `strategy.zero: 1`.")
    elif config.precision.reduce != compute:
        message = f"{config.precision.reduce}: at stage 0 DeepSpeed reduces gradients in {compute}"
        yield Problem("precision.reduce", message, f"Write `strategy.zero: 1`, or `precision.reduce: {compute}`.")
