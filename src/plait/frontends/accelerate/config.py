"""Translates an `accelerate` YAML into a run description, with a report on every key. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.config import choose, read, show, whole_number
from plait.errors import ConfigError, Problem
from plait.frontends import KeyEntry, KeyReader, TranslatedSettings, Translation, honoured, mapped, refused, unneeded
from plait.launch import Machines

# Readers of values: bool, numbers and choices in any of the spellings that Accelerate accepts.


class AccelerateSettings(TranslatedSettings):
    """The state of one translation. Reads values as Accelerate does; a value that it cannot read is a problem."""

    def section(self, key: str, value: Any) -> Mapping[str, Any] | None:
        """Return `value` if it is a section (a mapping); else None, with the outcome recorded: empty, or a problem."""
        if not value:
            self.unneeded(key, value, "empty")
        elif isinstance(value, Mapping):
            return value
        else:
            self.wrong(key, f"{value!r} is not a section", "Write its keys below it.")
        return None

    def flag(self, key: str, value: Any) -> bool:
        """Return a switch as a bool, from any spelling of true and false (`yes`, `"1"`); anything else is a problem."""
        if _is_off(value):
            return False
        if str(value).lower() not in ("true", "yes", "1"):
            self.wrong(key, f"{show(value)} is neither true nor false", "Write true or false.")
        return True

    def count(self, key: str, value: Any) -> int | None:
        """Return a whole number from 1; None, with a problem recorded, for anything else."""
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = 0
        if isinstance(value, bool) or number < 1:
            self.wrong(key, f"{show(value)} is not a number from 1", "Write a whole number.")
            return None
        return number

    def choice(self, key: str, value: Any, choices: Sequence[str]) -> str | None:
        """Return the one of `choices` that equals the value, ignoring case; None, with a problem, if none does."""
        match = next((choice for choice in choices if choice.lower() == str(value).lower()), None)
        if match is None:
            self.wrong(key, f"{show(value)} is not known", choose(value, choices, "value"))
        return match


Reader = KeyReader[AccelerateSettings]


def _is_off(value: Any) -> bool:
    return value is None or str(value).lower() in ("false", "no", "none", "0", "")


def refused_if_on(remedy: str) -> Reader:
    """Return a reader for a feature that Plait lacks: the key is unneeded while it is off, refused otherwise."""

    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        if value in ([], {}) or _is_off(value):
            settings.unneeded(key, value, "off, as here")
        else:
            settings.refused(key, value, remedy)

    return read


# Smaller sections of an Accelerate configuration: dynamo, parallelism, DeepSpeed, Megatron.


def section(readers: Mapping[str, Reader]) -> Reader:
    """Return a reader for a section with these keys."""

    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        if (section := settings.section(key, value)) is not None:
            settings.read(section, readers, key)

    return read


def _size(path: str) -> Reader:
    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        number = settings.count(key, 1 if value is None else value)
        if number is not None:
            settings.set(path, number)
            settings.honoured(key, value, f"{path}: {number}")

    return read


def _switch(path: str, on: Any = True, off: Any = False) -> Reader:
    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        setting = on if settings.flag(key, value) else off
        settings.set(path, setting)
        settings.honoured(key, value, f"{path}: {setting}")

    return read


def _when_on(values: Mapping[str, Any], reader: Reader) -> Reader:
    """Return a reader for a switch: when on, it sets these values, and `reader` records the outcome."""

    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        if not settings.flag(key, value):
            settings.unneeded(key, value, "off, as here")
            return
        for path, setting in values.items():
            settings.set(path, setting)
        reader(settings, key, value)

    return read


# ---- dynamo_config


def _backend(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).lower() in ("no", "false", "none"):
        settings.set("strategy.compile.enabled", False)
        settings.unneeded(key, value, "off, as here")
        return
    settings.set("strategy.compile.enabled", True)
    settings.set("strategy.compile.backend", str(value).lower())
    settings.honoured(key, value, f"strategy.compile.backend: {str(value).lower()}")


def _mode(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value not in (None, "default"):
        settings.set("strategy.compile.mode", str(value))
    settings.honoured(key, value, "strategy.compile.mode")


def read_dynamo(settings: AccelerateSettings, key: str, value: Any) -> None:
    """Read the section `dynamo_config`."""
    section(DYNAMO)(settings, key, value)
    if settings.get("strategy.compile.enabled") is False:  # any other key of `strategy.compile` would enable it
        for path in ("mode", "fullgraph", "dynamic", "scope"):
            settings.drop(f"strategy.compile.{path}")


DYNAMO: dict[str, Reader] = {
    "dynamo_backend": _backend,
    "dynamo_mode": _mode,
    "dynamo_use_fullgraph": _switch("strategy.compile.fullgraph"),
    "dynamo_use_dynamic": _switch("strategy.compile.dynamic", True, None),
    "dynamo_use_regional_compilation": _switch("strategy.compile.scope", "block", "auto"),
}


# ---- parallelism_config


def _rotation(settings: AccelerateSettings, key: str, value: Any) -> None:
    choice = settings.choice(key, value, ("allgather", "alltoall"))
    if choice is not None:
        settings.set("strategy.context.kind", "allgather" if choice == "allgather" else "ring")
        settings.mapped(key, value, f"strategy.context.kind: {settings.get('strategy.context.kind')}")


def _ulysses(settings: AccelerateSettings, key: str, value: Any) -> None:
    number = settings.count(key, 1 if value is None else value)
    if number is not None and number > 1:
        settings.set("strategy.layout.cp", number)
        settings.set("strategy.context.kind", "ulysses")
        settings.mapped(key, value, f"strategy.layout.cp: {number}, strategy.context.kind: ulysses")
    elif number is not None:
        settings.unneeded(key, value, "one rank per sequence, as here")


_LENGTH = unneeded("the sequence length is read from each batch")
PARALLELISM: dict[str, Reader] = {
    "parallelism_config_dp_replicate_size": _size("strategy.layout.dp_replicate"),
    "parallelism_config_dp_shard_size": _size("strategy.layout.dp_shard"),
    "parallelism_config_tp_size": _size("strategy.layout.tp"),
    "parallelism_config_cp_size": _size("strategy.layout.cp"),
    "parallelism_config_cp_backend": mapped("Plait's context parallelism: strategy.context"),
    "parallelism_config_cp_comm_strategy": _rotation,
    "parallelism_config_sp_size": _ulysses,
    "parallelism_config_sp_backend": mapped("Plait's own: strategy.context.kind: ulysses"),
    "parallelism_config_sp_seq_length": _LENGTH,
    "parallelism_config_sp_seq_length_is_variable": _LENGTH,
    "parallelism_config_sp_attn_implementation": unneeded("the model's own attention is parallelized"),
}


# ---- deepspeed_config


def read_deepspeed(settings: AccelerateSettings, key: str, value: Any) -> None:
    """Read the section with the translation of DeepSpeed's own configuration, so that both agree on every key."""
    if settings.section(key, value) is None:
        return
    from plait.frontends.deepspeed import translate

    file = value.get("deepspeed_config_file")
    if file not in (None, "none") and not isinstance(file, (str, Path, Mapping)):
        settings.wrong(f"{key}.deepspeed_config_file", f"{file!r} is not a file name", "Write the path of a file.")
        return
    if file not in (None, "none"):
        translation = translate(file)
        settings.mapped(f"{key}.deepspeed_config_file", file, "is read as a DeepSpeed configuration; its keys follow")
        settings.report.entries.extend(translation.report.entries)
        doubled = {"deepspeed_config_file", "zero3_init_flag", *_LAUNCHING}
        for name in value.keys() - doubled:
            settings.wrong(f"{key}.{name}", "is set beside deepspeed_config_file, which sets it too", "Leave it out.")
        rest = {name: setting for name, setting in value.items() if name != "deepspeed_config_file" and name in doubled}
        settings.read(rest, DEEPSPEED, key)
    else:
        settings.read(value, DEEPSPEED, key)
        config = deepspeed_config(value)
        translation = translate(config)
        _copy_outcomes(settings, key, value, {entry.key: entry for entry in translation.report.entries})
    _merge(settings, translation.sections)


def deepspeed_config(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration that Accelerate builds from these keys."""
    zero: dict[str, Any] = {"stage": _number(value.get("zero_stage", 2))}
    for role in ("optimizer", "param"):
        device = value.get(f"offload_{role}_device")
        if device not in (None, "none"):
            zero[f"offload_{role}"] = {"device": device}
            if device == "nvme":
                zero[f"offload_{role}"]["nvme_path"] = value.get(f"offload_{role}_nvme_path")
    config: dict[str, Any] = {"zero_optimization": zero}
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        if value.get(name) not in (None, "auto", "none"):
            config[name] = _number(value[name])
    return config


def _number(value: Any) -> Any:
    """Return the number that a text holds; any other value unchanged, which DeepSpeed's translation then checks."""
    try:
        return float(value) if "." in value else int(value)
    except (TypeError, ValueError):
        return value


def _copy_outcomes(
    settings: AccelerateSettings, key: str, value: Mapping[str, Any], entries: Mapping[str, KeyEntry]
) -> None:
    """Record for each key of the section the outcome of the DeepSpeed key that it sets."""
    for name, theirs in _DEEPSPEED_KEYS.items():
        if name not in value:
            continue
        entry = entries.get(theirs) or entries.get(theirs.rpartition(".")[0])
        if entry is None:
            settings.unneeded(f"{key}.{name}", value[name], "is the default")
        else:
            settings.report.add(entry.outcome, f"{key}.{name}", value[name], entry.text)


_DEEPSPEED_KEYS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}


def _merge(settings: AccelerateSettings, sections: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in sections.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            _merge(settings, value, f"{path}.")
        elif path == "precision.compute":
            set_precision(settings, "deepspeed_config", value)
        else:
            settings.set(path, value)


def set_precision(settings: AccelerateSettings, key: str, value: str) -> None:
    """Set the compute dtype; it is a problem if `mixed_precision` and DeepSpeed's configuration differ."""
    before = settings.get("precision.compute")
    if before not in (None, value):
        settings.wrong(key, f"{value} here, but {before} in another place", "Set it once, or the same in both places.")
    settings.set("precision.compute", value)


def _read_with_the_section(settings: AccelerateSettings, key: str, value: Any) -> None:
    """Do nothing: this key is read together with its section, and `_copy_outcomes` records its outcome."""


_LAUNCHING = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)
_LAUNCH = mapped("`plait launch` has the same option: --hostfile, --exclude, --include, --launcher")
DEEPSPEED: dict[str, Reader] = {
    "deepspeed_config_file": unneeded("none"),
    **dict.fromkeys(_DEEPSPEED_KEYS, _read_with_the_section),
    **dict.fromkeys(_LAUNCHING, _LAUNCH),
    "zero3_init_flag": mapped("strategy.meta_init: no rank ever holds the whole model"),
    "zero3_save_16bit_model": unneeded("`plait convert` writes a checkpoint in any format, also later"),
    "deepspeed_moe_layer_cls_names": refused_if_on("set `strategy.wrap.classes`, for experts too"),
}


# ---- megatron_lm_config


def _recompute_activations(settings: AccelerateSettings, key: str, value: Any) -> None:
    mode = "selective" if settings.flag(key, value) else "none"
    settings.set("strategy.recompute.mode", mode)
    settings.mapped(key, value, f"strategy.recompute: {mode}")


def _clip(settings: AccelerateSettings, key: str, value: Any) -> None:
    try:
        settings.set("train.clip_norm", float(value))
    except (TypeError, ValueError):
        settings.wrong(key, f"{value!r} is not a number", "Write a number above 0.")
        return
    settings.honoured(key, value, f"train.clip_norm: {float(value)}")


_MODEL = refused("describes a Megatron model; set it in the section `model`")
_MEGATRON: dict[str, Reader] = {
    "tp_degree": _size("strategy.layout.tp"),
    "pp_degree": _size("strategy.layout.pp"),
    "num_micro_batches": _size("strategy.pipeline.micro_batches"),
    "context_parallel_size": _size("strategy.layout.cp"),
    "expert_model_parallel_size": _size("strategy.layout.ep"),
    "sequence_parallelism": _switch("strategy.tensor.sequence_parallel"),
    "recompute_activations": _recompute_activations,
    "use_distributed_optimizer": _switch("strategy.zero", 1, 0),
    "gradient_clipping": _clip,
    "calculate_per_token_loss": unneeded("the loss is always divided by the tokens of the whole step"),
    "use_custom_fsdp": refused_if_on("write `distributed_type: FSDP`"),
    "no_load_optim": refused_if_on('write `checkpoint: {partial: ["optim.*"]}`'),
    "no_save_optim": refused_if_on("a checkpoint always holds the optimizer"),
    "optimizer_cpu_offload": refused_if_on("optimizer states stay on the device; set use_distributed_optimizer"),
    "overlap_cpu_optimizer_d2h_h2d": refused_if_on("needs optimizer_cpu_offload"),
    "use_precision_aware_optimizer": refused_if_on("optimizer states are always fp32"),
    "eod_mask_loss": _MODEL,
    "decoder_last_pipeline_num_layers": refused("set the layers of each stage in strategy.pipeline.split"),
    "recompute_granularity": refused("write `strategy: {recompute: full | selective}`"),
    "recompute_method": refused("write `strategy: {recompute: {mode: every, every: 2}}`"),
    "recompute_num_layers": refused("write `strategy: {recompute: {mode: every, every: 2}}`"),
    "expert_tensor_parallel_size": refused("`strategy.layout.tp` splits experts too: leave it out"),
    **dict.fromkeys(
        (
            "attention_backend",
            "attention_dropout",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "use_rotary_position_embeddings",
        ),
        _MODEL,
    ),
}
MEGATRON: dict[str, Reader] = {f"megatron_lm_{name}": reader for name, reader in _MEGATRON.items()}

read_parallelism = section(PARALLELISM)
read_megatron = section(MEGATRON)
read_mpirun = section(
    {
        "mpirun_hostfile": mapped("`plait launch --hostfile`"),
        "mpirun_ccl": unneeded("configures oneCCL's worker threads; gloo has its own"),
    }
)

# The section `fsdp_config`, for FSDP 1 and 2.


SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def read_fsdp(settings: AccelerateSettings, key: str, value: Any) -> None:
    """Read the section `fsdp_config`; the default strategy is FULL_SHARD, as in Accelerate."""
    if settings.section(key, value) is None:
        return
    if settings.get("strategy.zero") is None:
        settings.set("strategy.sharding", "FULL_SHARD")
    settings.read(value, FSDP_READERS, key)
    if settings.get("strategy.sharding") not in ("FULL_SHARD", "HYBRID_SHARD"):
        settings.drop("strategy.offload.params")  # parameters that are not sharded cannot be offloaded
    policy = str(value.get("fsdp_auto_wrap_policy", "")).upper()
    if policy == "SIZE_BASED_WRAP" and settings.get("strategy.wrap.min_params") is None:
        settings.wrong(
            f"{key}.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP needs a size", "Add fsdp_min_num_params, from 1."
        )


def _sharding(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).isdecimal() and 1 <= int(value) <= len(SHARDING):
        value = SHARDING[int(value) - 1]  # torch numbers them from 1
    choice = settings.choice(key, value, SHARDING)
    if choice is not None:
        sharding = "_HYBRID_SHARD_ZERO2" if choice == "HYBRID_SHARD_ZERO2" else choice
        settings.set("strategy.sharding", sharding)
        settings.honoured(key, value, f"strategy.sharding: {sharding}")


def _reshard(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).lower() in ("true", "false"):
        _switch("strategy.sharding", "FULL_SHARD", "SHARD_GRAD_OP")(settings, key, value)
    else:
        _sharding(settings, key, value)  # for FSDP 1 the value is a sharding strategy


def _policy(settings: AccelerateSettings, key: str, value: Any) -> None:
    choice = settings.choice(key, value or "NO_WRAP", _POLICIES)
    if choice == "TRANSFORMER_BASED_WRAP":
        settings.honoured(key, value, "strategy.wrap.classes where classes are named, else the model's own blocks")
    elif choice == "SIZE_BASED_WRAP":
        settings.honoured(key, value, "strategy.wrap.min_params")
    elif choice is not None:
        settings.mapped(key, value, "wraps the model's own blocks if it has any: the same result with less memory")


def _classes(settings: AccelerateSettings, key: str, value: Any) -> None:
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        settings.wrong(key, f"{value!r} does not name classes", "Write them separated by commas, or as a list.")
        return
    if names:
        settings.set("strategy.wrap.classes", names)
    settings.honoured(key, value, "strategy.wrap.classes" if names else "no class named: the model's own blocks")


def _min_params(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value in (None, 0):
        settings.unneeded(key, value, "no minimum size")
        return
    number = settings.count(key, value)
    if number is not None:
        settings.set("strategy.wrap.min_params", number)
        settings.honoured(key, value, "strategy.wrap.min_params")


def _backward_prefetch(settings: AccelerateSettings, key: str, value: Any) -> None:
    choice = settings.choice(key, value or "NO_PREFETCH", _PREFETCH)
    if choice == "BACKWARD_PRE":
        settings.honoured(key, value, "the next block is always gathered while the current one computes")
    elif choice is not None:
        settings.mapped(key, value, "the next block is always prefetched, as BACKWARD_PRE: the same result, faster")


def _version(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value) not in ("1", "2"):
        settings.wrong(key, f"{value!r} is not a version of FSDP", "Write 1 or 2.")
        return
    settings.mapped(key, value, "both versions use torch's fully_shard (FSDP 2)")


def _state_dict(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.choice(key, value, _STATE_DICTS) is not None:
        settings.unneeded(
            key, value, "a checkpoint is sharded and loads on any number of ranks; save_model writes the full weights"
        )


FSDP_READERS: dict[str, Reader] = {
    "fsdp_version": _version,
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_auto_wrap_policy": _policy,
    "fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_min_num_params": _min_params,
    "fsdp_backward_prefetch": _backward_prefetch,
    "fsdp_backward_prefetch_policy": _backward_prefetch,
    "fsdp_forward_prefetch": _when_on({"strategy.forward_prefetch": 1}, honoured("strategy.forward_prefetch: 1")),
    "fsdp_activation_checkpointing": _when_on(
        {"strategy.recompute.mode": "full"}, honoured("strategy.recompute: full")
    ),
    "fsdp_activation_checkpointing_offload": refused_if_on("activations are recomputed, not offloaded; leave it out"),
    "fsdp_offload_params": _when_on(
        {"strategy.offload.optimizer": "cpu", "strategy.offload.params": "cpu"},
        mapped("strategy.offload: {optimizer: cpu, params: cpu}; params only where they are resharded"),
    ),
    "fsdp_state_dict_type": _state_dict,
    "fsdp_cpu_ram_efficient_loading": mapped(
        "weights are created or read in shards (strategy.meta_init); a model object is taken from rank 0"
    ),
    "fsdp_sync_module_states": mapped("all ranks always start with rank 0's weights"),
    "fsdp_use_orig_params": unneeded("parameters always keep their names and can be frozen one by one"),
    "fsdp_ignored_modules": refused_if_on("every parameter is sharded; freeze those that must not be trained"),
    "fsdp_limit_all_gathers": unneeded("fully_shard limits how far it gathers ahead"),
}

_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
_DEVICES = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
_DISTRIBUTED_TYPES = (*_REPLICATED, "FSDP", "DEEPSPEED", "MEGATRON_LM", *_DEVICES)
_SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def translate(source: str | Path | Mapping[str, Any]) -> Translation:
    """Return the run description that an Accelerate configuration asks for, and the outcome of each of its keys.

    Raise `ConfigError` for keys and values that Accelerate itself does not know. Keys that Plait does not support are
    recorded as refused; `report.raise_refusals()` raises an error for them.
    """
    config = read(source)
    settings = AccelerateSettings()
    distributed_type = _requested_type(settings, config)
    if distributed_type in _REPLICATED:
        settings.set("strategy.zero", 0)
    elif distributed_type == "FSDP":
        settings.set("strategy.sharding", "FULL_SHARD")
    # Accelerate does not read the sections of other distributed types either.
    unread = {name for owner, name in _SECTION_OF.items() if owner != distributed_type}
    for name in unread & config.keys():
        settings.unneeded(name, config[name], f"not read by Accelerate either: distributed_type is {distributed_type}")
    settings.read({name: value for name, value in config.items() if name not in unread}, READERS)
    if distributed_type == "DEEPSPEED":
        _compare_precision(settings, config)
    return settings.translation()


def _compare_precision(settings: AccelerateSettings, config: Mapping[str, Any]) -> None:
    """Record a problem if the DeepSpeed file disables `mixed_precision`: Accelerate would silently use fp32."""
    asked, section = str(config.get("mixed_precision")).lower(), config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if asked not in ("fp16", "bf16") or file in (None, "none"):
        return
    from plait.frontends.deepspeed import read_config

    theirs = read_config(file).get(asked)
    if theirs is not None and str(theirs.get("enabled", False)).lower() == "false":
        message = f"{asked}, but `{asked}.enabled` of the DeepSpeed configuration is false"
        settings.wrong("mixed_precision", message, f"Write 'auto' in its section `{asked}`, or leave the section out.")


def is_accelerate(config: Mapping[str, Any]) -> bool:
    """Whether a mapping is a configuration of Accelerate, not of Plait."""
    return "distributed_type" in config or "compute_environment" in config


def processes(config: Mapping[str, Any]) -> int | None:
    """Return how many processes Accelerate would start per machine; None where the configuration does not say."""
    count = config.get("num_processes")
    return count // _machine_count(config) if isinstance(count, int) and count > 0 else None


def machines(config: Mapping[str, Any]) -> Machines | None:
    """Return the machines of a multi-node configuration; None for one machine.

    Raise `ConfigError` if it lacks what the nodes need to find each other.
    """
    problems = [
        Problem(key, f"{value!r}: `plait train` starts ranks on this machine only", remedy)
        for key, value, remedy in _elsewhere(config)
    ]
    count = _machine_count(config)
    rank, address, port, total = (
        config.get(key) for key in ("machine_rank", "main_process_ip", "main_process_port", "num_processes")
    )
    if count > 1 and not problems:
        if not isinstance(rank, int) or not 0 <= rank < count:
            remedy = f"Write 0 to {count - 1}, a different number on each machine."
            problems.append(Problem("machine_rank", f"{rank!r}, but num_machines is {count}", remedy))
        if not address:
            remedy = "Write the address of the machine whose machine_rank is 0."
            problems.append(Problem("main_process_ip", f"not set, but num_machines is {count}", remedy))
        if port is not None and not 0 < (whole_number(str(port)) or 0) < 1 << 16:
            remedy = "Write a port from 1 to 65535 that is free on the machine whose machine_rank is 0."
            problems.append(Problem("main_process_port", f"{port!r} is not a port", remedy))
        if isinstance(total, int) and total % count:
            remedy = f"Write a multiple of {count}: each machine starts equally many."
            problems.append(Problem("num_processes", f"{total}, but num_machines is {count}", remedy))
    if problems:
        raise ConfigError(problems)
    if count == 1:
        return None
    cluster = Machines(count, int(rank or 0), str(address))
    return cluster if port is None else replace(cluster, port=int(port))


def _machine_count(config: Mapping[str, Any]) -> int:
    count = config.get("num_machines")
    return count if isinstance(count, int) and count > 0 else 1


def _elsewhere(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, remedy) for keys that name hosts on which Accelerate itself would start processes."""
    for section, key in (("deepspeed_config", "deepspeed_hostfile"), ("mpirun_config", "mpirun_hostfile")):
        named = config.get(section)
        hostfile = named.get(key) if isinstance(named, Mapping) else None
        if hostfile:
            remedy = f"Start with `plait launch --hostfile {hostfile} --no_python plait train …`, or leave it out."
            yield f"{section}.{key}", hostfile, remedy


def as_overrides(sections: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return sections as command-line overrides: `strategy.zero=3`."""
    overrides: list[str] = []
    for name, value in sections.items():
        if isinstance(value, Mapping):
            overrides += as_overrides(value, f"{prefix}{name}.")
        else:
            overrides.append(f"{prefix}{name}={json.dumps(value)}")
    return overrides


def _requested_type(settings: AccelerateSettings, config: Mapping[str, Any]) -> str:
    value = config.get("distributed_type", "NO")
    if value is False:  # YAML reads a bare NO as false
        return "NO"
    return settings.choice("distributed_type", value, _DISTRIBUTED_TYPES) or "NO"


def _distributed_type(settings: AccelerateSettings, key: str, value: Any) -> None:
    name = "NO" if value is False else str(value).upper()
    if name in _DEVICES:
        settings.refused(key, value, "Plait runs on CPU, CUDA and XPU; write MULTI_GPU or MULTI_CPU")
    elif name in _REPLICATED:
        settings.honoured(key, value, "strategy.zero: 0 (replicas)")
    else:
        settings.honoured(key, value, f"the strategy is set by {_SECTION_OF.get(name)}")


def _compute_environment(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).upper() == "LOCAL_MACHINE":
        settings.honoured(key, value, "this machine")
    else:
        settings.refused(key, value, "write LOCAL_MACHINE; `plait launch` starts processes on the hosts of a cluster")


def _mixed_precision(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value in (None, False) or str(value).lower() == "no":
        settings.honoured(key, value, "precision: fp32")
        return
    choice = settings.choice(key, value, ("no", "fp16", "bf16", "fp8"))
    if choice == "fp8":
        settings.refused(
            key,
            value,
            "write bf16: Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`",
        )
    elif choice is not None:
        set_precision(settings, key, choice)
        settings.honoured(key, value, f"precision.compute: {choice}, with fp32 weights in the optimizer")


def _use_cpu(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.flag(key, value):
        settings.set("device", "cpu")
        settings.honoured(key, value, "device: cpu")
    else:
        settings.honoured(key, value, "device: auto")


def _num_processes(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value != -1 and settings.count(key, value) is None:
        return
    meaning = "`plait train` starts this machine's share unless --nproc is given; `plait launch --nproc_per_node`"
    settings.mapped(key, value, meaning)


def _num_machines(settings: AccelerateSettings, key: str, value: Any) -> None:
    number = settings.count(key, value)
    if number == 1:
        settings.honoured(key, value, "this machine")
    elif number is not None:
        meaning = "`plait train --accelerate-config`, run on each machine, starts the ranks of that one"
        settings.honoured(key, value, f"{meaning}; `plait launch --hostfile` starts all of them")


def _gpu_ids(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value in (None, "all"):
        settings.unneeded(key, value, "all devices, as here")
    else:
        settings.refused(key, value, f"start with CUDA_VISIBLE_DEVICES={value}")


_RENDEZVOUS = mapped("used with several machines; also `plait launch --node_rank`, `--master_addr`, `--master_port`")
_SAGEMAKER = refused("is for Amazon SageMaker; start the processes there with `plait launch`")
_TPU = refused_if_on("TPUs are not supported")

READERS: dict[str, Reader] = {
    "compute_environment": _compute_environment,
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "use_cpu": _use_cpu,
    "debug": mapped("a mismatched collective is always reported, with the rank that waits"),
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    **dict.fromkeys(
        ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"), _RENDEZVOUS
    ),
    "gpu_ids": _gpu_ids,
    "main_training_function": unneeded("scripts run as they are"),
    "enable_cpu_affinity": mapped("`plait launch --bind_cores_to_rank`"),
    "fsdp_config": read_fsdp,
    "deepspeed_config": read_deepspeed,
    "parallelism_config": read_parallelism,
    "megatron_lm_config": read_megatron,
    "mpirun_config": read_mpirun,
    "dynamo_config": read_dynamo,
    "fp8_config": refused_if_on(
        "Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`"
    ),
    **dict.fromkeys(
        ("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), _TPU
    ),
    **dict.fromkeys(("command_file", "commands"), _TPU),
    # keys of older versions
    "fp16": _when_on({"precision.compute": "fp16"}, mapped("precision.compute: fp16; now mixed_precision: fp16")),
    "dynamo_backend": lambda settings, key, value: read_dynamo(settings, key, {"dynamo_backend": value}),
    # keys of the compute environment AMAZON_SAGEMAKER
    **dict.fromkeys(
        (
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        ),
        _SAGEMAKER,
    ),
}
