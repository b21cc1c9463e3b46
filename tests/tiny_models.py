"""Tiny models of every architecture that `transformers` has for a task: random weights, two to four layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 16,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "n_inner": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_layers": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "o_lora_rank": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 8,
    "num_heads": 4,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 28,
    "patch_size": 14,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
"""Values of keys that models have in common; a key that a config class does not have is left out."""


def causal_model_types() -> list[str]:
    """Return the model types that `transformers` has a causal language model for, in order."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())


def tiny_keys(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of a tiny config of a model type."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    # Two names of one setting must not have two values.
    changes |= {name: changes[key] for key, name in type(default).attribute_map.items() if key in changes}
    return {"model_type": model_type, **_shrunk(default), **changes}


def _shrunk(config: Any) -> dict[str, Any]:
    keys = {key: value for key, value in SIZES.items() if getattr(config, key, None) is not None}
    layers = next((SIZES[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in keys), 4)
    for key, value in config.to_dict().items():
        if key in ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layer_types") and value:
            kinds = list(dict.fromkeys(value))
            keys[key] = [kinds[index % len(kinds)] for index in range(layers)]
    for name, part in vars(config).items():
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            keys[name] = {"model_type": part.model_type, **_shrunk(part)}
    return keys


def tiny_model(model_type: str, **changes: Any) -> nn.Module:
    """Return a tiny causal language model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_keys(model_type, **changes)))


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward pass has an argument."""
    return name in inspect.signature(model.forward).parameters


def built() -> Iterator[tuple[str, nn.Module | Exception]]:
    """Yield every causal model type with its tiny model, or with the error of its constructor."""
    for model_type in causal_model_types():
        try:
            torch.manual_seed(0)
            yield model_type, tiny_model(model_type)
        except Exception as error:
            yield model_type, error
