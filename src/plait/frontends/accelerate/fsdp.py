"""`fsdp_config` of Accelerate, of FSDP 1 and 2."""

from __future__ import annotations

from typing import Any

from plait.frontends.accelerate.words import Reader, Words, answered, switched_off

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def read_fsdp(words: Words, key: str, value: Any) -> None:
    """The whole section. Without a word about sharding it is FULL_SHARD, as there."""
    if words.section(key, value) is None:
        return
    if words.get("strategy.zero") is None:
        words.set("strategy.sharding", "FULL_SHARD")
    words.read(value, READERS, f"{key}.")
    if words.get("strategy.sharding") not in ("FULL_SHARD", "HYBRID_SHARD"):
        words.drop("strategy.offload.params")  # whole parameters stay where they compute
    policy = str(value.get("fsdp_auto_wrap_policy", "")).upper()
    if policy == "SIZE_BASED_WRAP" and words.get("strategy.wrap.min_params") is None:
        words.wrong(
            f"{key}.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP without a size", "Add fsdp_min_num_params, from 1."
        )


def _sharding(words: Words, key: str, value: Any) -> None:
    if str(value).isdecimal() and 1 <= int(value) <= len(SHARDING):
        value = SHARDING[int(value) - 1]  # torch numbers them from 1
    word = words.word(key, value, SHARDING)
    if word is not None:
        _shard(words, "_HYBRID_SHARD_ZERO2" if word == "HYBRID_SHARD_ZERO2" else word)
        words.honoured(key, value, f"strategy.sharding: {words.get('strategy.sharding')}")


def _reshard(words: Words, key: str, value: Any) -> None:
    if str(value).lower() not in ("true", "false"):
        _sharding(words, key, value)  # FSDP 1 takes a strategy here
        return
    sharding = "FULL_SHARD" if words.flag(key, value) else "SHARD_GRAD_OP"
    _shard(words, sharding)
    words.honoured(key, value, f"strategy.sharding: {sharding}")


def _shard(words: Words, sharding: str) -> None:
    words.set("strategy.sharding", sharding)


def _policy(words: Words, key: str, value: Any) -> None:
    word = words.word(key, value or "NO_WRAP", _POLICIES)
    if word == "TRANSFORMER_BASED_WRAP":
        words.honoured(key, value, "strategy.wrap.classes where classes are named, else the model's own blocks")
    elif word == "SIZE_BASED_WRAP":
        words.honoured(key, value, "strategy.wrap.min_params")
    elif word is not None:
        words.mapped(key, value, "the model's own blocks where it has any: the same maths, less memory at once")


def _classes(words: Words, key: str, value: Any) -> None:
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        words.wrong(key, f"{value!r} names no classes", "Write them with commas between, or as a list.")
        return
    if names:
        words.set("strategy.wrap.classes", names)
    words.honoured(key, value, "strategy.wrap.classes" if names else "none named: the model's own blocks")


def _min_params(words: Words, key: str, value: Any) -> None:
    if value in (None, 0):
        words.unneeded(key, value, "no least size")
        return
    number = words.count(key, value)
    if number is not None:
        words.set("strategy.wrap.min_params", number)
        words.honoured(key, value, "strategy.wrap.min_params")


def _backward_prefetch(words: Words, key: str, value: Any) -> None:
    word = words.word(key, value or "NO_PREFETCH", _PREFETCH)
    if word == "BACKWARD_PRE":
        words.honoured(key, value, "the next block is always gathered while this one computes")
    elif word is not None:
        words.mapped(key, value, "the next block is always gathered ahead, as BACKWARD_PRE: the same maths, faster")


def _forward_prefetch(words: Words, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("strategy.forward_prefetch", 1)
        words.honoured(key, value, "strategy.forward_prefetch: 1")
    else:
        words.unneeded(key, value, "off, as here")


def _recompute(words: Words, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("strategy.recompute.mode", "full")
        words.honoured(key, value, "strategy.recompute: full")
    else:
        words.unneeded(key, value, "off, as here")


def _version(words: Words, key: str, value: Any) -> None:
    if str(value) not in ("1", "2"):
        words.wrong(key, f"{value!r} is no version of FSDP", "Write 1 or 2.")
        return
    words.mapped(key, value, "one mechanism for both, torch's fully_shard (FSDP 2)")


def _offload(words: Words, key: str, value: Any) -> None:
    if not words.flag(key, value):
        words.unneeded(key, value, "off, as here")
        return
    words.set("strategy.offload.optimizer", "cpu")
    words.set("strategy.offload.params", "cpu")
    words.mapped(key, value, "strategy.offload: {optimizer: cpu, params: cpu}; params only where they are resharded")


def _state_dict(words: Words, key: str, value: Any) -> None:
    if words.word(key, value, _STATE_DICTS) is not None:
        words.unneeded(
            key, value, "a checkpoint is written in parts and read whole, by any number of ranks; save_model is whole"
        )


READERS: dict[str, Reader] = {
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
