"""An `accelerate` YAML as a run description of Plait, with a report on every key. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.config import choose, read, show, whole_number
from plait.errors import ConfigError, Problem
from plait.frontends import KeyEntry, KeyReader, TranslatedSettings, Translation, mapped, refused, unneeded
from plait.launch import Machines

# Values as people write them in YAML.


class AccelerateSettings(TranslatedSettings):
    """A translation under way that reads values as Accelerate does; a value that it cannot read is a problem."""

    def section(self, key: str, value: Any) -> Mapping[str, Any] | None:
        """Return a value that is a section; None, with the outcome recorded, where it is empty or not a section."""
        if not value:
            self.unneeded(key, value, "empty")
        elif isinstance(value, Mapping):
            return value
        else:
            self.wrong(key, f"{value!r} is not a section", "Write its keys below it.")
        return None

    def flag(self, key: str, value: Any) -> bool:
        """Return a switch as a bool: true and false, or the spellings of YAML and the command line."""
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
        """Return the one of `choices` that a value is, in any case; None, with a problem recorded, for any other."""
        match = next((choice for choice in choices if choice.lower() == str(value).lower()), None)
        if match is None:
            self.wrong(key, f"{show(value)} is not known", choose(value, choices, "value"))
        return match


Reader = KeyReader[AccelerateSettings]


def _is_off(value: Any) -> bool:
    return value is None or str(value).lower() in ("false", "no", "none", "0", "")


def refused_if_on(remedy: str) -> Reader:
    """A reader for what Plait does not have: unneeded while it is off, refused otherwise."""

    def read(settings: AccelerateSettings, key: str, value: Any) -> None:
        if value in ([], {}) or _is_off(value):
            settings.unneeded(key, value, "off, as here")
        else:
            settings.refused(key, value, remedy)

    return read


# Smaller sections of an Accelerate configuration: dynamo, parallelism, DeepSpeed, Megatron.


def section(readers: Mapping[str, Reader]) -> Reader:
    """A reader for a section with these keys."""

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


def _regional(settings: AccelerateSettings, key: str, value: Any) -> None:
    scope = "block" if settings.flag(key, value) else "auto"
    settings.set("strategy.compile.scope", scope)
    settings.honoured(key, value, f"strategy.compile.scope: {scope}")


def _dynamo(settings: AccelerateSettings, key: str, value: Any) -> None:
    section(DYNAMO)(settings, key, value)
    if (
        settings.get("strategy.compile.enabled") is False
    ):  # its other keys say nothing, and naming them would ask for it
        for path in ("mode", "fullgraph", "dynamic", "scope"):
            settings.drop(f"strategy.compile.{path}")


DYNAMO: dict[str, Reader] = {
    "dynamo_backend": _backend,
    "dynamo_mode": _mode,
    "dynamo_use_fullgraph": _switch("strategy.compile.fullgraph"),
    "dynamo_use_dynamic": _switch("strategy.compile.dynamic", True, None),
    "dynamo_use_regional_compilation": _regional,
}


# ---- parallelism_config


def _rotation(settings: AccelerateSettings, key: str, value: Any) -> None:
    word = settings.choice(key, value, ("allgather", "alltoall"))
    if word is not None:
        settings.set("strategy.context.kind", "allgather" if word == "allgather" else "ring")
        settings.mapped(key, value, f"strategy.context.kind: {settings.get('strategy.context.kind')}")


def _ulysses(settings: AccelerateSettings, key: str, value: Any) -> None:
    number = settings.count(key, 1 if value is None else value)
    if number is not None and number > 1:
        settings.set("strategy.layout.cp", number)
        settings.set("strategy.context.kind", "ulysses")
        settings.mapped(key, value, f"strategy.layout.cp: {number}, strategy.context.kind: ulysses")
    elif number is not None:
        settings.unneeded(key, value, "one rank a sequence, as here")


_LENGTH = unneeded("each batch says how long its sequences are")
PARALLELISM: dict[str, Reader] = {
    "parallelism_config_dp_replicate_size": _size("strategy.layout.dp_replicate"),
    "parallelism_config_dp_shard_size": _size("strategy.layout.dp_shard"),
    "parallelism_config_tp_size": _size("strategy.layout.tp"),
    "parallelism_config_cp_size": _size("strategy.layout.cp"),
    "parallelism_config_cp_backend": mapped("Plait's own attention over ranks: strategy.context"),
    "parallelism_config_cp_comm_strategy": _rotation,
    "parallelism_config_sp_size": _ulysses,
    "parallelism_config_sp_backend": mapped("Plait's own: strategy.context.kind: ulysses"),
    "parallelism_config_sp_seq_length": _LENGTH,
    "parallelism_config_sp_seq_length_is_variable": _LENGTH,
    "parallelism_config_sp_attn_implementation": unneeded("the model's own attention is spread"),
}


# ---- deepspeed_config


def read_deepspeed(settings: AccelerateSettings, key: str, value: Any) -> None:
    """The section, through the translation of DeepSpeed's own configuration: the same answer in both places."""
    if settings.section(key, value) is None:
        return
    from plait.frontends.deepspeed import translate

    file = value.get("deepspeed_config_file")
    if file not in (None, "none") and not isinstance(file, (str, Path, Mapping)):
        settings.wrong(f"{key}.deepspeed_config_file", f"{file!r} is no file", "Write its name.")
        return
    if file not in (None, "none"):
        found = translate(file)
        settings.mapped(f"{key}.deepspeed_config_file", file, "read as DeepSpeed's own file; its keys follow")
        settings.report.entries.extend(found.report.entries)
        doubled = {"deepspeed_config_file", "zero3_init_flag", *_LAUNCHING}
        for name in value.keys() - doubled:
            settings.wrong(f"{key}.{name}", "stands beside deepspeed_config_file, which says it too", "Leave it out.")
        rest = {name: each for name, each in value.items() if name != "deepspeed_config_file" and name in doubled}
        settings.read(rest, DEEPSPEED, key)
    else:
        settings.read(value, DEEPSPEED, key)
        config = deepspeed_config(value)
        found = translate(config)
        _take_answers(settings, key, value, {entry.key: entry for entry in found.report.entries})
    _merge(settings, found.sections)


def deepspeed_config(value: Mapping[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration that these keys stand for, as Accelerate makes it."""
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
    """A number that was written as text; what is none stays, for DeepSpeed's own translation to speak about."""
    try:
        return float(value) if "." in value else int(value)
    except (TypeError, ValueError):
        return value


def _take_answers(
    settings: AccelerateSettings, key: str, value: Mapping[str, Any], found: Mapping[str, KeyEntry]
) -> None:
    """Give each key the answer that DeepSpeed's own word for it got."""
    for name, own in _OWN_WORDS.items():
        if name not in value:
            continue
        entry = next((found[each] for each in (own, own.rpartition(".")[0]) if each in found), None)
        if entry is None:
            settings.unneeded(f"{key}.{name}", value[name], "says what is so anyway")
        else:
            settings.report.add(entry.outcome, f"{key}.{name}", value[name], entry.text)


_OWN_WORDS = {
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
    """Set the format; that `mixed_precision` and DeepSpeed's configuration say different things is a mistake."""
    before = settings.get("precision.compute")
    if before not in (None, value):
        settings.wrong(key, f"{value} here, and {before} in another place", "Give it in one place, or the same twice.")
    settings.set("precision.compute", value)


def _later(settings: AccelerateSettings, key: str, value: Any) -> None:
    """`_take_answers` answers it."""


_LAUNCHING = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)
_LAUNCH = mapped("`plait launch` takes the same word: --hostfile, --exclude, --include, --launcher")
DEEPSPEED: dict[str, Reader] = {
    "deepspeed_config_file": unneeded("none"),
    **dict.fromkeys(_OWN_WORDS, _later),
    **dict.fromkeys(_LAUNCHING, _LAUNCH),
    "zero3_init_flag": mapped("strategy.meta_init: no rank ever holds the whole model"),
    "zero3_save_16bit_model": unneeded("`plait convert` writes a checkpoint in any format, also later"),
    "deepspeed_moe_layer_cls_names": refused_if_on("`strategy.wrap.classes` names blocks, of experts too"),
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
        settings.wrong(key, f"{value!r} is no number", "Write a number above 0.")
        return
    settings.honoured(key, value, f"train.clip_norm: {float(value)}")


_MODEL = refused("it describes a model of Megatron's; write it into the section `model`")
_ELSEWHERE = "has no counterpart; leave it out"
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
    "calculate_per_token_loss": unneeded("a loss is always divided by the tokens of the whole step"),
    "use_custom_fsdp": refused_if_on("write `distributed_type: FSDP`"),
    "no_load_optim": refused_if_on('write `checkpoint: {partial: ["optim.*"]}`'),
    "no_save_optim": refused_if_on("a checkpoint always holds the optimizer"),
    "optimizer_cpu_offload": refused_if_on("optimizer states stay on the device; use use_distributed_optimizer"),
    "overlap_cpu_optimizer_d2h_h2d": refused_if_on("goes with optimizer_cpu_offload"),
    "use_precision_aware_optimizer": refused_if_on("optimizer states are fp32 here"),
    "eod_mask_loss": _MODEL,
    "decoder_last_pipeline_num_layers": refused("name the first layers of each in strategy.pipeline.split"),
    "recompute_granularity": refused("write `strategy: {recompute: full | selective}`"),
    "recompute_method": refused("write `strategy: {recompute: {mode: every, every: 2}}`"),
    "recompute_num_layers": refused("write `strategy: {recompute: {mode: every, every: 2}}`"),
    "expert_tensor_parallel_size": refused(f"`strategy.layout.tp` cuts experts too: this {_ELSEWHERE}"),
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

read_dynamo = _dynamo
read_parallelism = section(PARALLELISM)
read_megatron = section(MEGATRON)
read_mpirun = section(
    {
        "mpirun_hostfile": mapped("`plait launch --hostfile`"),
        "mpirun_ccl": unneeded("oneCCL's worker threads; gloo has its own"),
    }
)

# `fsdp_config` of Accelerate, of FSDP 1 and 2.


SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def read_fsdp(settings: AccelerateSettings, key: str, value: Any) -> None:
    """The whole section. Without a word about sharding it is FULL_SHARD, as there."""
    if settings.section(key, value) is None:
        return
    if settings.get("strategy.zero") is None:
        settings.set("strategy.sharding", "FULL_SHARD")
    settings.read(value, FSDP_READERS, key)
    if settings.get("strategy.sharding") not in ("FULL_SHARD", "HYBRID_SHARD"):
        settings.drop("strategy.offload.params")  # whole parameters stay where they compute
    policy = str(value.get("fsdp_auto_wrap_policy", "")).upper()
    if policy == "SIZE_BASED_WRAP" and settings.get("strategy.wrap.min_params") is None:
        settings.wrong(
            f"{key}.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP without a size", "Add fsdp_min_num_params, from 1."
        )


def _sharding(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).isdecimal() and 1 <= int(value) <= len(SHARDING):
        value = SHARDING[int(value) - 1]  # torch numbers them from 1
    word = settings.choice(key, value, SHARDING)
    if word is not None:
        _shard(settings, "_HYBRID_SHARD_ZERO2" if word == "HYBRID_SHARD_ZERO2" else word)
        settings.honoured(key, value, f"strategy.sharding: {settings.get('strategy.sharding')}")


def _reshard(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).lower() not in ("true", "false"):
        _sharding(settings, key, value)  # FSDP 1 takes a strategy here
        return
    sharding = "FULL_SHARD" if settings.flag(key, value) else "SHARD_GRAD_OP"
    _shard(settings, sharding)
    settings.honoured(key, value, f"strategy.sharding: {sharding}")


def _shard(settings: AccelerateSettings, sharding: str) -> None:
    settings.set("strategy.sharding", sharding)


def _policy(settings: AccelerateSettings, key: str, value: Any) -> None:
    word = settings.choice(key, value or "NO_WRAP", _POLICIES)
    if word == "TRANSFORMER_BASED_WRAP":
        settings.honoured(key, value, "strategy.wrap.classes where classes are named, else the model's own blocks")
    elif word == "SIZE_BASED_WRAP":
        settings.honoured(key, value, "strategy.wrap.min_params")
    elif word is not None:
        settings.mapped(key, value, "the model's own blocks where it has any: the same maths, less memory at once")


def _classes(settings: AccelerateSettings, key: str, value: Any) -> None:
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        settings.wrong(key, f"{value!r} names no classes", "Write them with commas between, or as a list.")
        return
    if names:
        settings.set("strategy.wrap.classes", names)
    settings.honoured(key, value, "strategy.wrap.classes" if names else "none named: the model's own blocks")


def _min_params(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value in (None, 0):
        settings.unneeded(key, value, "no least size")
        return
    number = settings.count(key, value)
    if number is not None:
        settings.set("strategy.wrap.min_params", number)
        settings.honoured(key, value, "strategy.wrap.min_params")


def _backward_prefetch(settings: AccelerateSettings, key: str, value: Any) -> None:
    word = settings.choice(key, value or "NO_PREFETCH", _PREFETCH)
    if word == "BACKWARD_PRE":
        settings.honoured(key, value, "the next block is always gathered while this one computes")
    elif word is not None:
        settings.mapped(key, value, "the next block is always gathered ahead, as BACKWARD_PRE: the same maths, faster")


def _forward_prefetch(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.flag(key, value):
        settings.set("strategy.forward_prefetch", 1)
        settings.honoured(key, value, "strategy.forward_prefetch: 1")
    else:
        settings.unneeded(key, value, "off, as here")


def _recompute(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.flag(key, value):
        settings.set("strategy.recompute.mode", "full")
        settings.honoured(key, value, "strategy.recompute: full")
    else:
        settings.unneeded(key, value, "off, as here")


def _version(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value) not in ("1", "2"):
        settings.wrong(key, f"{value!r} is no version of FSDP", "Write 1 or 2.")
        return
    settings.mapped(key, value, "one mechanism for both, torch's fully_shard (FSDP 2)")


def _offload(settings: AccelerateSettings, key: str, value: Any) -> None:
    if not settings.flag(key, value):
        settings.unneeded(key, value, "off, as here")
        return
    settings.set("strategy.offload.optimizer", "cpu")
    settings.set("strategy.offload.params", "cpu")
    settings.mapped(key, value, "strategy.offload: {optimizer: cpu, params: cpu}; params only where they are resharded")


def _state_dict(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.choice(key, value, _STATE_DICTS) is not None:
        settings.unneeded(
            key, value, "a checkpoint is written in parts and read whole, by any number of ranks; save_model is whole"
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
    "fsdp_forward_prefetch": _forward_prefetch,
    "fsdp_activation_checkpointing": _recompute,
    "fsdp_activation_checkpointing_offload": refused_if_on("activations are recomputed, and not moved; leave it out"),
    "fsdp_offload_params": _offload,
    "fsdp_state_dict_type": _state_dict,
    "fsdp_cpu_ram_efficient_loading": mapped(
        "weights are made or read in parts (strategy.meta_init); a model given as an object is rank 0's"
    ),
    "fsdp_sync_module_states": mapped("all ranks always begin with rank 0's weights"),
    "fsdp_use_orig_params": unneeded("parameters always keep their names, and may be frozen one by one"),
    "fsdp_ignored_modules": refused_if_on("every parameter is sharded; freeze what is not to be trained"),
    "fsdp_limit_all_gathers": unneeded("fully_shard never runs further ahead than memory allows"),
}

_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
_DEVICES = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
_KINDS = (*_PLAIN, "FSDP", "DEEPSPEED", "MEGATRON_LM", *_DEVICES)
_SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def translate(source: str | Path | Mapping[str, Any]) -> Translation:
    """The run description that an Accelerate configuration stands for, and what became of each of its keys.

    Raises `ConfigError` for keys and values that Accelerate itself does not know. What Plait cannot do is in the
    report; `report.raise_refusals()` makes an error of it.
    """
    config = read(source)
    settings = AccelerateSettings()
    kind = _kind(settings, config)
    if kind in _PLAIN:
        settings.set("strategy.zero", 0)
    elif kind == "FSDP":
        settings.set("strategy.sharding", "FULL_SHARD")
    # Sections of other kinds are asked for by nobody: Accelerate leaves them unread, and so does this.
    silent = {name for owner, name in _SECTION_OF.items() if owner != kind}
    for name in silent & config.keys():
        settings.unneeded(name, config[name], f"not read, there as here: distributed_type is {kind}")
    settings.read({name: value for name, value in config.items() if name not in silent}, READERS)
    if kind == "DEEPSPEED":
        _compare_precision(settings, config)
    return settings.translation()


def _compare_precision(settings: AccelerateSettings, config: Mapping[str, Any]) -> None:
    """With Accelerate, DeepSpeed's section stays as it is beside `mixed_precision`: off, it trains in fp32 unsaid."""
    asked, section = str(config.get("mixed_precision")).lower(), config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if asked not in ("fp16", "bf16") or file in (None, "none"):
        return
    from plait.frontends.deepspeed import read_config

    theirs = read_config(file).get(asked)
    if theirs is not None and str(theirs.get("enabled", False)).lower() == "false":
        message = f"{asked}, and `{asked}.enabled` of the DeepSpeed configuration does not switch it on"
        settings.wrong("mixed_precision", message, f"Write 'auto' in its section `{asked}`, or leave the section out.")


def is_accelerate(config: Mapping[str, Any]) -> bool:
    """Whether a mapping is one of Accelerate's configurations, and none of Plait's."""
    return "distributed_type" in config or "compute_environment" in config


def processes(config: Mapping[str, Any]) -> int | None:
    """How many processes Accelerate would start on each machine; None where it does not say."""
    count = config.get("num_processes")
    return count // _machine_count(config) if isinstance(count, int) and count > 0 else None


def machines(config: Mapping[str, Any]) -> Machines | None:
    """The machines of a configuration; None for this one alone. Raises `ConfigError` where they could not meet."""
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
            remedy = f"Write 0 to {count - 1}, another number in the file of each machine."
            problems.append(Problem("machine_rank", f"{rank!r}, and num_machines is {count}", remedy))
        if not address:
            remedy = "Write the address of the machine whose machine_rank is 0."
            problems.append(Problem("main_process_ip", f"there is none, and num_machines is {count}", remedy))
        if port is not None and not 0 < (whole_number(str(port)) or 0) < 1 << 16:
            remedy = "Write one that is free on the machine whose machine_rank is 0, from 1 to 65535."
            problems.append(Problem("main_process_port", f"{port!r} is not a port", remedy))
        if isinstance(total, int) and total % count:
            remedy = f"Write a multiple of {count}: each machine starts as many."
            problems.append(Problem("num_processes", f"{total}, and num_machines is {count}", remedy))
    if problems:
        raise ConfigError(problems)
    if count == 1:
        return None
    found = Machines(count, int(rank or 0), str(address))
    return found if port is None else replace(found, port=int(port))


def _machine_count(config: Mapping[str, Any]) -> int:
    count = config.get("num_machines")
    return count if isinstance(count, int) and count > 0 else 1


def _elsewhere(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys that name other machines, which Accelerate reaches from this one."""
    for section, key in (("deepspeed_config", "deepspeed_hostfile"), ("mpirun_config", "mpirun_hostfile")):
        named = config.get(section)
        hostfile = named.get(key) if isinstance(named, Mapping) else None
        if hostfile:
            remedy = f"Start with `plait launch --hostfile {hostfile} --no_python plait train …`, or leave it out."
            yield f"{section}.{key}", hostfile, remedy


def as_overrides(sections: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Sections as they would stand on a command line: `strategy.zero=3`."""
    found: list[str] = []
    for name, value in sections.items():
        if isinstance(value, Mapping):
            found += as_overrides(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}={json.dumps(value)}")
    return found


def _kind(settings: AccelerateSettings, config: Mapping[str, Any]) -> str:
    value = config.get("distributed_type", "NO")
    word = (
        "NO" if value is False else settings.choice("distributed_type", value, _KINDS)
    )  # YAML reads a bare NO as false
    return word or "NO"


def _distributed_type(settings: AccelerateSettings, key: str, value: Any) -> None:
    kind = "NO" if value is False else str(value).upper()
    if kind in _DEVICES:
        settings.refused(key, value, "Plait runs on CPU, CUDA and XPU; write MULTI_GPU or MULTI_CPU")
    elif kind in _PLAIN:
        settings.honoured(key, value, "strategy.zero: 0 (replicas)")
    else:
        settings.honoured(key, value, f"the strategy is as {_SECTION_OF.get(kind)} says")


def _compute_environment(settings: AccelerateSettings, key: str, value: Any) -> None:
    if str(value).upper() == "LOCAL_MACHINE":
        settings.honoured(key, value, "this machine")
    else:
        settings.refused(key, value, "write LOCAL_MACHINE; hosts of a cluster are reached by `plait launch`")


def _mixed_precision(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value in (None, False) or str(value).lower() == "no":
        settings.honoured(key, value, "precision: fp32")
        return
    word = settings.choice(key, value, ("no", "fp16", "bf16", "fp8"))
    if word == "fp8":
        settings.refused(
            key,
            value,
            "write bf16: Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`",
        )
    elif word is not None:
        set_precision(settings, key, word)
        settings.honoured(key, value, f"precision.compute: {word}, with fp32 weights in the optimizer")


def _old_fp16(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.flag(key, value):
        settings.set("precision.compute", "fp16")
        settings.mapped(key, value, "the old word for mixed_precision: fp16; precision.compute: fp16")
    else:
        settings.unneeded(key, value, "off, as here")


def _old_dynamo(settings: AccelerateSettings, key: str, value: Any) -> None:
    read_dynamo(settings, key, {"dynamo_backend": value})


def _use_cpu(settings: AccelerateSettings, key: str, value: Any) -> None:
    if settings.flag(key, value):
        settings.set("device", "cpu")
        settings.honoured(key, value, "device: cpu")
    else:
        settings.honoured(key, value, "device: auto")


def _num_processes(settings: AccelerateSettings, key: str, value: Any) -> None:
    if value != -1 and settings.count(key, value) is None:
        return
    meaning = (
        "`plait train` starts its share for this machine, unless --nproc is given; `plait launch --nproc_per_node`"
    )
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


_MEETING = mapped("of several machines; also `plait launch --node_rank`, `--master_addr`, `--master_port`")
_SAGEMAKER = refused("Amazon SageMaker's own; start the processes there with `plait launch`")
_TPU = refused_if_on("there are no TPUs here")

READERS: dict[str, Reader] = {
    "compute_environment": _compute_environment,
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "use_cpu": _use_cpu,
    "debug": mapped("a collective that ranks disagree about is always named, with the rank that waits"),
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "machine_rank": _MEETING,
    "main_process_ip": _MEETING,
    "main_process_port": _MEETING,
    "rdzv_backend": _MEETING,
    "same_network": _MEETING,
    "gpu_ids": _gpu_ids,
    "main_training_function": unneeded("a script is run as it is"),
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
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    # of older versions
    "fp16": _old_fp16,
    "dynamo_backend": _old_dynamo,
    # of the other compute environment
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
