"""Llama weights in the names of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.config import LlamaConfig
from plait.errors import ModelError
from plait.models.common.exchange import Made, same
from plait.models.common.weights import Put, stream_weights
from plait.models.llama.block import ffn_dim

_RENAMES = (
    (r"^model\.embed_tokens\.", "embedding."),
    (r"^model\.layers\.", "blocks."),
    (r"^model\.norm\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.\1."),
    (r"\.self_attn\.o_proj\.", ".attention.out."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn.\1."),
)
_LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)

UNUSED = (r"rotary_emb\.inv_freq$",)
"""Stored tensors, in the names of `transformers`, that a `Llama` computes itself."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` Llama folder into a `Llama` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[*UNUSED, *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Our name for one tensor of `LlamaForCausalLM`; the layout is the same."""
    yield _ours(name), tensor


def to_transformers(config: LlamaConfig) -> dict[str, Made]:
    """The tensors of `LlamaForCausalLM`, each made of ours."""
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(config.layers) for part in _LAYER]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    if not config.tie_embeddings:
        names.append("lm_head.weight")
    return {name: Made((_ours(name),), same) for name in names}


def _ours(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def describe(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": ffn_dim(config),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        # Version 5 reads the second of these, older ones the first.
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,  # by default there are some, which a tokenizer of one's own does not mean
        "eos_token_id": None,
    }


def from_description(found: Mapping[str, Any]) -> LlamaConfig:
    """Our configuration for a `config.json` of `transformers`; `ModelError` where a `Llama` computes otherwise."""
    dim, heads = found["hidden_size"], found["num_attention_heads"]
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    wanted = {
        "model_type": (found.get("model_type"), "llama"),
        "hidden_act": (found.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(found.get("attention_bias", False)), False),
        "mlp_bias": (bool(found.get("mlp_bias", False)), False),
        "head_dim": (found.get("head_dim") or dim // heads, dim // heads),
        "rope_type": (kind, "default"),
    }
    for key, (value, needed) in wanted.items():
        if value != needed:
            raise ModelError(
                f"config.json has {key} {value!r}, and Plait's llama knows {needed!r} only; use `model.type: hf` for it"
            )
    return LlamaConfig(
        vocab_size=found["vocab_size"],
        dim=dim,
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=None if found.get("num_key_value_heads") in (None, heads) else found["num_key_value_heads"],
        ffn_dim=found["intermediate_size"],
        seq_len=found.get("max_position_embeddings", 2048),
        rope_base=float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
        norm_eps=found.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(found.get("tie_word_embeddings", False)),
    )
