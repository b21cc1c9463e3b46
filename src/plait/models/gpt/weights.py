"""GPT-2 weights in the names and layout of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.config import GptConfig
from plait.errors import ModelError
from plait.models.common.exchange import Made, same
from plait.models.common.weights import Put, stream_weights

_RENAMES = (
    (r"^transformer\.", ""),
    (r"^wte\.", "embedding."),
    (r"^wpe\.", "position_embedding."),
    (r"^h\.", "blocks."),
    (r"^ln_f\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".ffn_norm."),
    (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.mlp\.c_fc\.", ".ffn.up."),
    (r"\.mlp\.c_proj\.", ".ffn.down."),
)
_JOINED = ".attn.c_attn."
_LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

UNUSED = (r"\.attn\.(masked_)?bias$",)
"""Stored tensors, in the names of `transformers`, that a `Gpt` has no use for: causal masks, in old files."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` GPT-2 folder into a `Gpt` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[*UNUSED, *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Our tensors for one of `GPT2LMHeadModel`, which joins q, k and v and stores matrices transposed."""
    ours = _ours(name)
    tensor = _turned(ours[0], tensor)
    for part, piece in zip(ours, tensor.chunk(len(ours)), strict=True):
        yield part, piece.contiguous()


def to_transformers(config: GptConfig) -> dict[str, Made]:
    """The tensors of `GPT2LMHeadModel`, each made of ours; it always has biases, which are zero where we have none."""
    layers = [f"transformer.h.{layer}.{part}" for layer in range(config.layers) for part in _LAYER]
    made = {name: Made((_ours(name)[0],), same) for name in ("transformer.wte.weight", "transformer.wpe.weight")}
    for name in (*layers, "transformer.ln_f"):
        weights = _ours(f"{name}.weight")
        made[f"{name}.weight"] = Made(weights, partial(_joined, weights[0]))
        biases = _ours(f"{name}.bias")
        made[f"{name}.bias"] = Made(biases, partial(_joined, biases[0])) if config.bias else Made(weights, _no_bias)
    if not config.tie_embeddings:
        made["lm_head.weight"] = Made(("head.weight",), same)
    return made


def _ours(name: str) -> tuple[str, ...]:
    """Our name for a tensor, or our three names."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    if _JOINED in name:
        return tuple(name.replace(_JOINED, f".attention.{part}.") for part in "qkv")
    return (name,)


def _turned(ours: str, tensor: Tensor) -> Tensor:
    """From one layout of a matrix to the other."""
    return tensor.t() if tensor.ndim == 2 and re.search(r"(attention|ffn)\.", ours) else tensor


def _joined(ours: str, *parts: Tensor) -> Tensor:
    return _turned(ours, torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()


def _no_bias(*weights: Tensor) -> Tensor:
    return weights[0].new_zeros(sum(weight.shape[0] for weight in weights))


def describe(config: GptConfig) -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # by default there are some, which a small vocabulary does not have
        "eos_token_id": None,
    }


def from_description(found: Mapping[str, Any]) -> GptConfig:
    """Our configuration for a `config.json` of `transformers`; `ModelError` where a `Gpt` computes otherwise."""
    dim = found.get("n_embd", 768)
    wanted = {
        "model_type": (found.get("model_type"), ("gpt2",)),
        "activation_function": (found.get("activation_function", "gelu_new"), ("gelu_new", "gelu_pytorch_tanh")),
        "n_inner": (found.get("n_inner") or 4 * dim, (4 * dim,)),
        "layer_norm_epsilon": (found.get("layer_norm_epsilon", 1e-5), (1e-5,)),
        "scale_attn_weights": (found.get("scale_attn_weights", True), (True,)),
        "scale_attn_by_inverse_layer_idx": (found.get("scale_attn_by_inverse_layer_idx", False), (False,)),
    }
    for key, (value, needed) in wanted.items():
        if value not in needed:
            raise ModelError(
                f"config.json has {key} {value!r}, and Plait's gpt knows {needed[0]!r} only; use `model.type: hf`"
            )
    return GptConfig(
        vocab_size=found.get("vocab_size", 50257),
        dim=dim,
        layers=found.get("n_layer", 12),
        heads=found.get("n_head", 12),
        seq_len=found.get("n_positions", 1024),
        dropout=float(found.get("resid_pdrop", 0.1)),
        tie_embeddings=bool(found.get("tie_word_embeddings", True)),
    )
