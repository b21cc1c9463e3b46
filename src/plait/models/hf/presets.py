"""Tiny models of three families, as keywords of `HFConfig`; for tests and first steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-llama": {"config": {"model_type": "llama", **_SIZES}},
        "tiny-qwen": {"config": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **_SIZES}},
        "tiny-gpt2": {
            "config": {
                "model_type": "gpt2",
                "vocab_size": 256,
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        },
    }
)
