"""Tables: DeepSpeed's modules that have no file here, and what to use instead of names that are not offered."""

from __future__ import annotations

from plait.frontends import MirroredPackage

_REPLACEMENTS = {
    "DeepSpeedTransformerLayer": "torch's own attention is fused; use the model as it is",
    "DeepSpeedTransformerConfig": "torch's own attention is fused; use the model as it is",
    "DeepSpeedHybridEngine": "generate from the model that trains with plait.generate",
    "DeepSpeedConfig": "plait.frontends.deepspeed.translate reads a configuration, and reports on every key",
    "tp_model_init": "`tensor_parallel: {autotp_size: n}` in the configuration does the same",
    "module_inject": "`tensor_parallel: {autotp_size: n}` in the configuration shards a model's layers",
    "onebit": "DeepSpeed 0.19 has removed compressed optimizers too; use AdamW",
    "compression": "models are not compressed here",
    "autotuning": "`plait tune` searches the fastest settings",
    "profiling": "`plait profile` measures a step's operations, memory and time",
    "nebula": "`checkpoint.async_save` writes checkpoints while training continues",
    "sequence": "`strategy.layout.cp` with `plait train` shards sequences",
    "linear": "LoRA models of peft train as they are",
}


def _estimates(stage: int) -> list[str]:
    name = f"estimate_zero{stage}_model_states_mem_needs"
    return [name, f"{name}_all_cold", f"{name}_all_live"]


_ZERO = {
    "parameter_links": ["ZeroParamStatus", "is_zero_param"],
    "zero": ["GatheredParameters", "Init", "register_external_parameter"],
}
_MODULES: dict[str, dict[str, list[str]]] = {
    "checkpoint": {},
    "checkpoint.utils": {"saving": ["clone_tensors_for_torch_save"]},
    "moe": {},
    "moe.layer": {"experts": ["MoE"]},
    "moe.utils": {
        "experts": ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]
    },
    "ops": {},
    "ops.adagrad": {"optimizers": ["DeepSpeedCPUAdagrad"]},
    "ops.adam": {"optimizers": ["DeepSpeedCPUAdam", "FusedAdam"]},
    "ops.adam.cpu_adam": {"optimizers": ["DeepSpeedCPUAdam"]},
    "ops.adam.fused_adam": {"optimizers": ["FusedAdam"]},
    "ops.lamb": {"optimizers": ["FusedLamb"]},
    "ops.lion": {"optimizers": ["DeepSpeedCPULion", "FusedLion"]},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        "checkpointing": ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
    },
    "runtime.dataloader": {"loader": ["DeepSpeedDataLoader", "RepeatingLoader"]},
    "runtime.engine": {"engine": ["DeepSpeedEngine"]},
    "runtime.lr_schedules": {
        "lr_schedules": [
            "VALID_LR_SCHEDULES",
            "LRRangeTest",
            "OneCycle",
            "Scheduler",
            "WarmupCosineLR",
            "WarmupDecayLR",
            "WarmupLR",
        ]
    },
    "runtime.pipe": {"pipe": ["LayerSpec", "PipelineModule", "TiedLayerSpec"]},
    "runtime.pipe.engine": {"pipeline_engine": ["PipelineEngine"]},
    "runtime.pipe.module": {"pipe": ["LayerSpec", "PipelineModule", "TiedLayerSpec"]},
    "runtime.pipe.topology": {"pipe": ["PipeDataParallelTopology"]},
    "runtime.utils": {"accelerator": ["see_memory_usage"]},
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "runtime.zero.stage3": {"plait.plan": _estimates(3)},
    "runtime.zero.stage_1_and_2": {"plait.plan": _estimates(2)},
    "runtime.zero.utils": {"parameter_links": ["is_zero_param"]},
    "utils.init_on_device": {"utils": ["OnDevice"]},
    "utils.logging": {"utils": ["log_dist", "logger"]},
    "utils.tensor_fragment": {
        "utils": [
            "safe_get_full_fp32_param",
            "safe_get_full_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_optimizer_state",
        ]
    },
    "utils.z3_leaf_module": {
        "utils": ["get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"]
    },
}

DEEPSPEED = MirroredPackage(
    "plait.frontends.deepspeed", "deepspeed", "DeepSpeed", "docs/deepspeed-api.md", _REPLACEMENTS, _MODULES
)
not_offered = DEEPSPEED.not_offered
