"""An `accelerate` YAML as a run description of Plait, with an account of every key. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.config import choose, read, show, whole_number
from plait.errors import ConfigError, Problem
from plait.frontends import KeyEntry, KeyOutcome, KeyReport, Translation
from plait.launch import Machines

# A translation while it is put together: settings in Plait's words, and an answer for every key.


Reader = Callable[["TranslatedSettings", str, Any], None]
"""Answers one key: (words, the key's full name, its value)."""


class TranslatedSettings:
    """Collects settings by their dotted paths, and what became of each key."""

    def __init__(self) -> None:
        self.report = KeyReport()
        self.problems: list[Problem] = []
        self._settings: dict[str, Any] = {}

    def set(self, path: str, value: Any) -> None:
        """Give a setting of Plait a value."""
        self._settings[path] = value

    def get(self, path: str) -> Any:
        """What a setting was given; None where it was not."""
        return self._settings.get(path)

    def drop(self, path: str) -> None:
        """Take a setting back."""
        self._settings.pop(path, None)

    def honoured(self, key: str, value: Any, text: str) -> None:
        """It does here what it does there."""
        self.report.add(KeyOutcome.HONOURED, key, value, text)

    def mapped(self, key: str, value: Any, text: str) -> None:
        """Something here does the same under another name."""
        self.report.add(KeyOutcome.MAPPED, key, value, text)

    def unneeded(self, key: str, value: Any, text: str) -> None:
        """It has no meaning here."""
        self.report.add(KeyOutcome.UNNEEDED, key, value, text)

    def refused(self, key: str, value: Any, text: str) -> None:
        """It cannot be had."""
        self.report.add(KeyOutcome.REFUSED, key, value, text)

    def wrong(self, key: str, message: str, remedy: str) -> None:
        """The key or its value is a mistake."""
        self.problems.append(Problem(key, message, remedy))

    def read(self, section: Mapping[str, Any], readers: Mapping[str, Reader], prefix: str = "") -> None:
        """Answer every key of a section; an unknown one is a problem, with a suggestion."""
        for name, value in section.items():
            reader = readers.get(name)
            if reader is None:
                self.wrong(f"{prefix}{name}", "Accelerate has no such key", choose(name, sorted(readers), "key"))
            else:
                reader(self, f"{prefix}{name}", value)

    def section(self, key: str, value: Any) -> Mapping[str, Any] | None:
        """The section that a value is; None, with the answer given, where there is nothing to read."""
        if not value:
            self.unneeded(key, value, "empty")
        elif isinstance(value, Mapping):
            return value
        else:
            self.wrong(key, f"{value!r} is no section", "Write its keys below it.")
        return None

    def translation(self) -> Translation:
        """The sections and the account; raises `ConfigError` with every mistake."""
        if self.problems:
            raise ConfigError(self.problems)
        sections: dict[str, Any] = {}
        for path, value in self._settings.items():
            *outer, name = path.split(".")
            node = sections
            for part in outer:
                node = node.setdefault(part, {})
            node[name] = value
        return Translation(sections, self.report)

    # ---- values as people write them

    def flag(self, key: str, value: Any) -> bool:
        """A switch: true and false, or the words that YAML and the command line have for them."""
        word = str(value).lower()
        if value is None or word in ("false", "no", "none", "0", ""):
            return False
        if word not in ("true", "yes", "1"):
            self.wrong(key, f"{show(value)} is neither true nor false", "Write true or false.")
        return True

    def count(self, key: str, value: Any, *, least: int = 1) -> int | None:
        """A whole number; None, with a problem, where it is none."""
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if isinstance(value, bool) or number < least:
            self.wrong(key, f"{show(value)} is no number from {least}", "Write a whole number.")
            return None
        return number

    def word(self, key: str, value: Any, choices: Iterable[str]) -> str | None:
        """One of `choices`, in any case; None, with a problem, where it is none of them."""
        choices = list(choices)
        found = next((choice for choice in choices if choice.lower() == str(value).lower()), None)
        if found is None:
            self.wrong(key, f"{show(value)} is not known", choose(value, choices, "word"))
        return found


def answered(kind: str, text: str) -> Reader:
    """A reader that gives the same answer to any value: `mapped`, `unneeded` or `refused`."""
    return lambda words, key, value: getattr(words, kind)(key, value, text)


def switched_off(refusal: str) -> Reader:
    """A reader for what Plait does not have: fine while it is off, refused otherwise."""

    def read(words: TranslatedSettings, key: str, value: Any) -> None:
        if value in (None, [], {}, "") or (not isinstance(value, (list, dict)) and _is_off(value)):
            words.unneeded(key, value, "off, as here")
        else:
            words.refused(key, value, refusal)

    return read


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "no", "none", "0")


# Smaller sections of an Accelerate configuration: dynamo, parallelism, DeepSpeed, Megatron.


def section(readers: Mapping[str, Reader]) -> Reader:
    """A reader for a section with these keys."""

    def read(words: TranslatedSettings, key: str, value: Any) -> None:
        if (section := words.section(key, value)) is not None:
            words.read(section, readers, f"{key}.")

    return read


def _size(path: str) -> Reader:
    def read(words: TranslatedSettings, key: str, value: Any) -> None:
        number = words.count(key, 1 if value is None else value)
        if number is not None:
            words.set(path, number)
            words.honoured(key, value, f"{path}: {number}")

    return read


def _switch(path: str, on: Any = True, off: Any = False) -> Reader:
    def read(words: TranslatedSettings, key: str, value: Any) -> None:
        setting = on if words.flag(key, value) else off
        words.set(path, setting)
        words.honoured(key, value, f"{path}: {setting}")

    return read


# ---- dynamo_config


def _backend(words: TranslatedSettings, key: str, value: Any) -> None:
    if str(value).lower() in ("no", "false", "none"):
        words.set("strategy.compile.enabled", False)
        words.unneeded(key, value, "off, as here")
        return
    words.set("strategy.compile.enabled", True)
    words.set("strategy.compile.backend", str(value).lower())
    words.honoured(key, value, f"strategy.compile.backend: {str(value).lower()}")


def _mode(words: TranslatedSettings, key: str, value: Any) -> None:
    if value not in (None, "default"):
        words.set("strategy.compile.mode", str(value))
    words.honoured(key, value, "strategy.compile.mode")


def _regional(words: TranslatedSettings, key: str, value: Any) -> None:
    scope = "block" if words.flag(key, value) else "auto"
    words.set("strategy.compile.scope", scope)
    words.honoured(key, value, f"strategy.compile.scope: {scope}")


def _dynamo(words: TranslatedSettings, key: str, value: Any) -> None:
    section(DYNAMO)(words, key, value)
    if words.get("strategy.compile.enabled") is False:  # its other keys say nothing, and naming them would ask for it
        for path in ("mode", "fullgraph", "dynamic", "scope"):
            words.drop(f"strategy.compile.{path}")


DYNAMO: dict[str, Reader] = {
    "dynamo_backend": _backend,
    "dynamo_mode": _mode,
    "dynamo_use_fullgraph": _switch("strategy.compile.fullgraph"),
    "dynamo_use_dynamic": _switch("strategy.compile.dynamic", True, None),
    "dynamo_use_regional_compilation": _regional,
}


# ---- parallelism_config


def _rotation(words: TranslatedSettings, key: str, value: Any) -> None:
    word = words.word(key, value, ("allgather", "alltoall"))
    if word is not None:
        words.set("strategy.context.kind", "allgather" if word == "allgather" else "ring")
        words.mapped(key, value, f"strategy.context.kind: {words.get('strategy.context.kind')}")


def _ulysses(words: TranslatedSettings, key: str, value: Any) -> None:
    number = words.count(key, 1 if value is None else value)
    if number is not None and number > 1:
        words.set("strategy.layout.cp", number)
        words.set("strategy.context.kind", "ulysses")
        words.mapped(key, value, f"strategy.layout.cp: {number}, strategy.context.kind: ulysses")
    elif number is not None:
        words.unneeded(key, value, "one rank a sequence, as here")


_LENGTH = answered("unneeded", "each batch says how long its sequences are")
PARALLELISM: dict[str, Reader] = {
    "parallelism_config_dp_replicate_size": _size("strategy.layout.dp_replicate"),
    "parallelism_config_dp_shard_size": _size("strategy.layout.dp_shard"),
    "parallelism_config_tp_size": _size("strategy.layout.tp"),
    "parallelism_config_cp_size": _size("strategy.layout.cp"),
    "parallelism_config_cp_backend": answered("mapped", "Plait's own attention over ranks: strategy.context"),
    "parallelism_config_cp_comm_strategy": _rotation,
    "parallelism_config_sp_size": _ulysses,
    "parallelism_config_sp_backend": answered("mapped", "Plait's own: strategy.context.kind: ulysses"),
    "parallelism_config_sp_seq_length": _LENGTH,
    "parallelism_config_sp_seq_length_is_variable": _LENGTH,
    "parallelism_config_sp_attn_implementation": answered("unneeded", "the model's own attention is spread"),
}


# ---- deepspeed_config


def read_deepspeed(words: TranslatedSettings, key: str, value: Any) -> None:
    """The section, through the translation of DeepSpeed's own configuration: the same answer in both places."""
    if words.section(key, value) is None:
        return
    from plait.frontends.deepspeed import translate

    file = value.get("deepspeed_config_file")
    if file not in (None, "none") and not isinstance(file, (str, Path, Mapping)):
        words.wrong(f"{key}.deepspeed_config_file", f"{file!r} is no file", "Write its name.")
        return
    if file not in (None, "none"):
        found = translate(file)
        words.mapped(f"{key}.deepspeed_config_file", file, "read as DeepSpeed's own file; its keys follow")
        words.report.entries.extend(found.report.entries)
        doubled = {"deepspeed_config_file", "zero3_init_flag", *_LAUNCHING}
        for name in value.keys() - doubled:
            words.wrong(f"{key}.{name}", "stands beside deepspeed_config_file, which says it too", "Leave it out.")
        rest = {name: each for name, each in value.items() if name != "deepspeed_config_file" and name in doubled}
        words.read(rest, DEEPSPEED, f"{key}.")
    else:
        words.read(value, DEEPSPEED, f"{key}.")
        config = deepspeed_config(value)
        found = translate(config)
        _take_answers(words, key, value, {entry.key: entry for entry in found.report.entries})
    _merge(words, found.sections)


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


def _take_answers(words: TranslatedSettings, key: str, value: Mapping[str, Any], found: Mapping[str, KeyEntry]) -> None:
    """Give each key the answer that DeepSpeed's own word for it got."""
    for name, own in _OWN_WORDS.items():
        if name not in value:
            continue
        entry = next((found[each] for each in (own, own.rpartition(".")[0]) if each in found), None)
        if entry is None:
            words.unneeded(f"{key}.{name}", value[name], "says what is so anyway")
        else:
            words.report.add(entry.outcome, f"{key}.{name}", value[name], entry.text)


_OWN_WORDS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}


def _merge(words: TranslatedSettings, sections: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in sections.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            _merge(words, value, f"{path}.")
        elif path == "precision.compute":
            set_precision(words, "deepspeed_config", value)
        else:
            words.set(path, value)


def set_precision(words: TranslatedSettings, key: str, value: str) -> None:
    """Set the format; that `mixed_precision` and DeepSpeed's configuration say different things is a mistake."""
    before = words.get("precision.compute")
    if before not in (None, value):
        words.wrong(key, f"{value} here, and {before} in another place", "Give it in one place, or the same twice.")
    words.set("precision.compute", value)


def _later(words: TranslatedSettings, key: str, value: Any) -> None:
    """`_take_answers` answers it."""


_LAUNCHING = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)
_LAUNCH = answered("mapped", "`plait launch` takes the same word: --hostfile, --exclude, --include, --launcher")
DEEPSPEED: dict[str, Reader] = {
    "deepspeed_config_file": answered("unneeded", "none"),
    **dict.fromkeys(_OWN_WORDS, _later),
    **dict.fromkeys(_LAUNCHING, _LAUNCH),
    "zero3_init_flag": answered("mapped", "strategy.meta_init: no rank ever holds the whole model"),
    "zero3_save_16bit_model": answered("unneeded", "`plait convert` writes a checkpoint in any format, also later"),
    "deepspeed_moe_layer_cls_names": switched_off("`strategy.wrap.classes` names blocks, of experts too"),
}


# ---- megatron_lm_config


def _recompute_activations(words: TranslatedSettings, key: str, value: Any) -> None:
    mode = "selective" if words.flag(key, value) else "none"
    words.set("strategy.recompute.mode", mode)
    words.mapped(key, value, f"strategy.recompute: {mode}")


def _clip(words: TranslatedSettings, key: str, value: Any) -> None:
    try:
        words.set("train.clip_norm", float(value))
    except (TypeError, ValueError):
        words.wrong(key, f"{value!r} is no number", "Write a number above 0.")
        return
    words.honoured(key, value, f"train.clip_norm: {float(value)}")


_MODEL = answered("refused", "it describes a model of Megatron's; write it into the section `model`")
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
    "calculate_per_token_loss": answered("unneeded", "a loss is always divided by the tokens of the whole step"),
    "use_custom_fsdp": switched_off("write `distributed_type: FSDP`"),
    "no_load_optim": switched_off('write `checkpoint: {partial: ["optim.*"]}`'),
    "no_save_optim": switched_off("a checkpoint always holds the optimizer"),
    "optimizer_cpu_offload": switched_off("optimizer states stay on the device; use use_distributed_optimizer"),
    "overlap_cpu_optimizer_d2h_h2d": switched_off("goes with optimizer_cpu_offload"),
    "use_precision_aware_optimizer": switched_off("optimizer states are fp32 here"),
    "eod_mask_loss": _MODEL,
    "decoder_last_pipeline_num_layers": answered("refused", "name the first layers of each in strategy.pipeline.split"),
    "recompute_granularity": answered("refused", "write `strategy: {recompute: full | selective}`"),
    "recompute_method": answered("refused", "write `strategy: {recompute: {mode: every, every: 2}}`"),
    "recompute_num_layers": answered("refused", "write `strategy: {recompute: {mode: every, every: 2}}`"),
    "expert_tensor_parallel_size": answered("refused", f"`strategy.layout.tp` cuts experts too: this {_ELSEWHERE}"),
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
        "mpirun_hostfile": answered("mapped", "`plait launch --hostfile`"),
        "mpirun_ccl": answered("unneeded", "oneCCL's worker threads; gloo has its own"),
    }
)

# `fsdp_config` of Accelerate, of FSDP 1 and 2.


SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def read_fsdp(words: TranslatedSettings, key: str, value: Any) -> None:
    """The whole section. Without a word about sharding it is FULL_SHARD, as there."""
    if words.section(key, value) is None:
        return
    if words.get("strategy.zero") is None:
        words.set("strategy.sharding", "FULL_SHARD")
    words.read(value, FSDP_READERS, f"{key}.")
    if words.get("strategy.sharding") not in ("FULL_SHARD", "HYBRID_SHARD"):
        words.drop("strategy.offload.params")  # whole parameters stay where they compute
    policy = str(value.get("fsdp_auto_wrap_policy", "")).upper()
    if policy == "SIZE_BASED_WRAP" and words.get("strategy.wrap.min_params") is None:
        words.wrong(
            f"{key}.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP without a size", "Add fsdp_min_num_params, from 1."
        )


def _sharding(words: TranslatedSettings, key: str, value: Any) -> None:
    if str(value).isdecimal() and 1 <= int(value) <= len(SHARDING):
        value = SHARDING[int(value) - 1]  # torch numbers them from 1
    word = words.word(key, value, SHARDING)
    if word is not None:
        _shard(words, "_HYBRID_SHARD_ZERO2" if word == "HYBRID_SHARD_ZERO2" else word)
        words.honoured(key, value, f"strategy.sharding: {words.get('strategy.sharding')}")


def _reshard(words: TranslatedSettings, key: str, value: Any) -> None:
    if str(value).lower() not in ("true", "false"):
        _sharding(words, key, value)  # FSDP 1 takes a strategy here
        return
    sharding = "FULL_SHARD" if words.flag(key, value) else "SHARD_GRAD_OP"
    _shard(words, sharding)
    words.honoured(key, value, f"strategy.sharding: {sharding}")


def _shard(words: TranslatedSettings, sharding: str) -> None:
    words.set("strategy.sharding", sharding)


def _policy(words: TranslatedSettings, key: str, value: Any) -> None:
    word = words.word(key, value or "NO_WRAP", _POLICIES)
    if word == "TRANSFORMER_BASED_WRAP":
        words.honoured(key, value, "strategy.wrap.classes where classes are named, else the model's own blocks")
    elif word == "SIZE_BASED_WRAP":
        words.honoured(key, value, "strategy.wrap.min_params")
    elif word is not None:
        words.mapped(key, value, "the model's own blocks where it has any: the same maths, less memory at once")


def _classes(words: TranslatedSettings, key: str, value: Any) -> None:
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        words.wrong(key, f"{value!r} names no classes", "Write them with commas between, or as a list.")
        return
    if names:
        words.set("strategy.wrap.classes", names)
    words.honoured(key, value, "strategy.wrap.classes" if names else "none named: the model's own blocks")


def _min_params(words: TranslatedSettings, key: str, value: Any) -> None:
    if value in (None, 0):
        words.unneeded(key, value, "no least size")
        return
    number = words.count(key, value)
    if number is not None:
        words.set("strategy.wrap.min_params", number)
        words.honoured(key, value, "strategy.wrap.min_params")


def _backward_prefetch(words: TranslatedSettings, key: str, value: Any) -> None:
    word = words.word(key, value or "NO_PREFETCH", _PREFETCH)
    if word == "BACKWARD_PRE":
        words.honoured(key, value, "the next block is always gathered while this one computes")
    elif word is not None:
        words.mapped(key, value, "the next block is always gathered ahead, as BACKWARD_PRE: the same maths, faster")


def _forward_prefetch(words: TranslatedSettings, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("strategy.forward_prefetch", 1)
        words.honoured(key, value, "strategy.forward_prefetch: 1")
    else:
        words.unneeded(key, value, "off, as here")


def _recompute(words: TranslatedSettings, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("strategy.recompute.mode", "full")
        words.honoured(key, value, "strategy.recompute: full")
    else:
        words.unneeded(key, value, "off, as here")


def _version(words: TranslatedSettings, key: str, value: Any) -> None:
    if str(value) not in ("1", "2"):
        words.wrong(key, f"{value!r} is no version of FSDP", "Write 1 or 2.")
        return
    words.mapped(key, value, "one mechanism for both, torch's fully_shard (FSDP 2)")


def _offload(words: TranslatedSettings, key: str, value: Any) -> None:
    if not words.flag(key, value):
        words.unneeded(key, value, "off, as here")
        return
    words.set("strategy.offload.optimizer", "cpu")
    words.set("strategy.offload.params", "cpu")
    words.mapped(key, value, "strategy.offload: {optimizer: cpu, params: cpu}; params only where they are resharded")


def _state_dict(words: TranslatedSettings, key: str, value: Any) -> None:
    if words.word(key, value, _STATE_DICTS) is not None:
        words.unneeded(
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
    "fsdp_activation_checkpointing_offload": switched_off("activations are recomputed, and not moved; leave it out"),
    "fsdp_offload_params": _offload,
    "fsdp_state_dict_type": _state_dict,
    "fsdp_cpu_ram_efficient_loading": answered(
        "mapped", "weights are made or read in parts (strategy.meta_init); a model given as an object is rank 0's"
    ),
    "fsdp_sync_module_states": answered("mapped", "all ranks always begin with rank 0's weights"),
    "fsdp_use_orig_params": answered("unneeded", "parameters always keep their names, and may be frozen one by one"),
    "fsdp_ignored_modules": switched_off("every parameter is sharded; freeze what is not to be trained"),
    "fsdp_limit_all_gathers": answered("unneeded", "fully_shard never runs further ahead than memory allows"),
}

_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
_DEVICES = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
_KINDS = (*_PLAIN, "FSDP", "DEEPSPEED", "MEGATRON_LM", *_DEVICES)
_SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def translate(source: str | Path | Mapping[str, Any]) -> Translation:
    """The run description that an Accelerate configuration stands for, and what became of each of its keys.

    Raises `ConfigError` for keys and values that Accelerate itself does not know. What Plait cannot do is in the
    account; `account.raise_refusals()` makes an error of it.
    """
    config = read(source)
    words = TranslatedSettings()
    kind = _kind(words, config)
    if kind in _PLAIN:
        words.set("strategy.zero", 0)
    elif kind == "FSDP":
        words.set("strategy.sharding", "FULL_SHARD")
    # Sections of other kinds are asked for by nobody: Accelerate leaves them unread, and so does this.
    silent = {name for owner, name in _SECTION_OF.items() if owner != kind}
    for name in silent & config.keys():
        words.unneeded(name, config[name], f"not read, there as here: distributed_type is {kind}")
    words.read({name: value for name, value in config.items() if name not in silent}, READERS)
    if kind == "DEEPSPEED":
        _compare_precision(words, config)
    return words.translation()


def _compare_precision(words: TranslatedSettings, config: Mapping[str, Any]) -> None:
    """With Accelerate, DeepSpeed's section stays as it is beside `mixed_precision`: off, it trains in fp32 unsaid."""
    asked, section = str(config.get("mixed_precision")).lower(), config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if asked not in ("fp16", "bf16") or file in (None, "none"):
        return
    from plait.frontends.deepspeed import read_config

    theirs = read_config(file).get(asked)
    if theirs is not None and str(theirs.get("enabled", False)).lower() == "false":
        message = f"{asked}, and `{asked}.enabled` of the DeepSpeed configuration does not switch it on"
        words.wrong("mixed_precision", message, f"Write 'auto' in its section `{asked}`, or leave the section out.")


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


def _kind(words: TranslatedSettings, config: Mapping[str, Any]) -> str:
    value = config.get("distributed_type", "NO")
    word = "NO" if value is False else words.word("distributed_type", value, _KINDS)  # YAML reads a bare NO as false
    return word or "NO"


def _distributed_type(words: TranslatedSettings, key: str, value: Any) -> None:
    kind = "NO" if value is False else str(value).upper()
    if kind in _DEVICES:
        words.refused(key, value, "Plait runs on CPU, CUDA and XPU; write MULTI_GPU or MULTI_CPU")
    elif kind in _PLAIN:
        words.honoured(key, value, "strategy.zero: 0 (replicas)")
    else:
        words.honoured(key, value, f"the strategy is as {_SECTION_OF.get(kind)} says")


def _compute_environment(words: TranslatedSettings, key: str, value: Any) -> None:
    if str(value).upper() == "LOCAL_MACHINE":
        words.honoured(key, value, "this machine")
    else:
        words.refused(key, value, "write LOCAL_MACHINE; hosts of a cluster are reached by `plait launch`")


def _mixed_precision(words: TranslatedSettings, key: str, value: Any) -> None:
    if value in (None, False) or str(value).lower() == "no":
        words.honoured(key, value, "precision: fp32")
        return
    word = words.word(key, value, ("no", "fp16", "bf16", "fp8"))
    if word == "fp8":
        words.refused(
            key,
            value,
            "write bf16: Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`",
        )
    elif word is not None:
        set_precision(words, key, word)
        words.honoured(key, value, f"precision.compute: {word}, with fp32 weights in the optimizer")


def _old_fp16(words: TranslatedSettings, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("precision.compute", "fp16")
        words.mapped(key, value, "the old word for mixed_precision: fp16; precision.compute: fp16")
    else:
        words.unneeded(key, value, "off, as here")


def _old_dynamo(words: TranslatedSettings, key: str, value: Any) -> None:
    read_dynamo(words, key, {"dynamo_backend": value})


def _use_cpu(words: TranslatedSettings, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("device", "cpu")
        words.honoured(key, value, "device: cpu")
    else:
        words.honoured(key, value, "device: auto")


def _num_processes(words: TranslatedSettings, key: str, value: Any) -> None:
    if value != -1 and words.count(key, value) is None:
        return
    meaning = (
        "`plait train` starts its share for this machine, unless --nproc is given; `plait launch --nproc_per_node`"
    )
    words.mapped(key, value, meaning)


def _num_machines(words: TranslatedSettings, key: str, value: Any) -> None:
    number = words.count(key, value)
    if number == 1:
        words.honoured(key, value, "this machine")
    elif number is not None:
        meaning = "`plait train --accelerate-config`, run on each machine, starts the ranks of that one"
        words.honoured(key, value, f"{meaning}; `plait launch --hostfile` starts all of them")


def _gpu_ids(words: TranslatedSettings, key: str, value: Any) -> None:
    if value in (None, "all"):
        words.unneeded(key, value, "all devices, as here")
    else:
        words.refused(key, value, f"start with CUDA_VISIBLE_DEVICES={value}")


_MEETING = answered("mapped", "of several machines; also `plait launch --node_rank`, `--master_addr`, `--master_port`")
_SAGEMAKER = answered("refused", "Amazon SageMaker's own; start the processes there with `plait launch`")
_TPU = switched_off("there are no TPUs here")

READERS: dict[str, Reader] = {
    "compute_environment": _compute_environment,
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "use_cpu": _use_cpu,
    "debug": answered("mapped", "a collective that ranks disagree about is always named, with the rank that waits"),
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "machine_rank": _MEETING,
    "main_process_ip": _MEETING,
    "main_process_port": _MEETING,
    "rdzv_backend": _MEETING,
    "same_network": _MEETING,
    "gpu_ids": _gpu_ids,
    "main_training_function": answered("unneeded", "a script is run as it is"),
    "enable_cpu_affinity": answered("mapped", "`plait launch --bind_cores_to_rank`"),
    "fsdp_config": read_fsdp,
    "deepspeed_config": read_deepspeed,
    "parallelism_config": read_parallelism,
    "megatron_lm_config": read_megatron,
    "mpirun_config": read_mpirun,
    "dynamo_config": read_dynamo,
    "fp8_config": switched_off("Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`"),
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
