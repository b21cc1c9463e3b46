"""Smaller sections of an Accelerate configuration: dynamo, parallelism, DeepSpeed, Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.frontends import Entry
from plait.frontends.accelerate.words import Reader, Words, answered, switched_off


def section(readers: Mapping[str, Reader]) -> Reader:
    """A reader for a section with these keys."""

    def read(words: Words, key: str, value: Any) -> None:
        if (section := words.section(key, value)) is not None:
            words.read(section, readers, f"{key}.")

    return read


def _size(path: str) -> Reader:
    def read(words: Words, key: str, value: Any) -> None:
        number = words.count(key, 1 if value is None else value)
        if number is not None:
            words.set(path, number)
            words.honoured(key, value, f"{path}: {number}")

    return read


def _switch(path: str, on: Any = True, off: Any = False) -> Reader:
    def read(words: Words, key: str, value: Any) -> None:
        setting = on if words.flag(key, value) else off
        words.set(path, setting)
        words.honoured(key, value, f"{path}: {setting}")

    return read


# ---- dynamo_config


def _backend(words: Words, key: str, value: Any) -> None:
    if str(value).lower() in ("no", "false", "none"):
        words.set("strategy.compile.enabled", False)
        words.unneeded(key, value, "off, as here")
        return
    words.set("strategy.compile.enabled", True)
    words.set("strategy.compile.backend", str(value).lower())
    words.honoured(key, value, f"strategy.compile.backend: {str(value).lower()}")


def _mode(words: Words, key: str, value: Any) -> None:
    if value not in (None, "default"):
        words.set("strategy.compile.mode", str(value))
    words.honoured(key, value, "strategy.compile.mode")


def _regional(words: Words, key: str, value: Any) -> None:
    scope = "block" if words.flag(key, value) else "auto"
    words.set("strategy.compile.scope", scope)
    words.honoured(key, value, f"strategy.compile.scope: {scope}")


def _dynamo(words: Words, key: str, value: Any) -> None:
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


def _rotation(words: Words, key: str, value: Any) -> None:
    word = words.word(key, value, ("allgather", "alltoall"))
    if word is not None:
        words.set("strategy.context.kind", "allgather" if word == "allgather" else "ring")
        words.mapped(key, value, f"strategy.context.kind: {words.get('strategy.context.kind')}")


def _ulysses(words: Words, key: str, value: Any) -> None:
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


def read_deepspeed(words: Words, key: str, value: Any) -> None:
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
        words.account.entries.extend(found.account.entries)
        doubled = {"deepspeed_config_file", "zero3_init_flag", *_LAUNCHING}
        for name in value.keys() - doubled:
            words.wrong(f"{key}.{name}", "stands beside deepspeed_config_file, which says it too", "Leave it out.")
        rest = {name: each for name, each in value.items() if name != "deepspeed_config_file" and name in doubled}
        words.read(rest, DEEPSPEED, f"{key}.")
    else:
        words.read(value, DEEPSPEED, f"{key}.")
        config = deepspeed_config(value)
        found = translate(config)
        _take_answers(words, key, value, {entry.key: entry for entry in found.account.entries})
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


def _take_answers(words: Words, key: str, value: Mapping[str, Any], found: Mapping[str, Entry]) -> None:
    """Give each key the answer that DeepSpeed's own word for it got."""
    for name, own in _OWN_WORDS.items():
        if name not in value:
            continue
        entry = next((found[each] for each in (own, own.rpartition(".")[0]) if each in found), None)
        if entry is None:
            words.unneeded(f"{key}.{name}", value[name], "says what is so anyway")
        else:
            words.account.add(entry.answer, f"{key}.{name}", value[name], entry.text)


_OWN_WORDS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}


def _merge(words: Words, sections: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in sections.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            _merge(words, value, f"{path}.")
        elif path == "precision.compute":
            set_precision(words, "deepspeed_config", value)
        else:
            words.set(path, value)


def set_precision(words: Words, key: str, value: str) -> None:
    """Set the format; that `mixed_precision` and DeepSpeed's configuration say different things is a mistake."""
    before = words.get("precision.compute")
    if before not in (None, value):
        words.wrong(key, f"{value} here, and {before} in another place", "Give it in one place, or the same twice.")
    words.set("precision.compute", value)


def _later(words: Words, key: str, value: Any) -> None:
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


def _recompute_activations(words: Words, key: str, value: Any) -> None:
    mode = "selective" if words.flag(key, value) else "none"
    words.set("strategy.recompute.mode", mode)
    words.mapped(key, value, f"strategy.recompute: {mode}")


def _clip(words: Words, key: str, value: Any) -> None:
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
