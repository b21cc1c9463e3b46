"""Llama weights in the names of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from plait.models.common.weights import Put, stream_weights

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


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` Llama folder into a `Llama` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[r"rotary_emb\.inv_freq$", *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Our name for one tensor of `LlamaForCausalLM`; the layout is the same."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    yield name, tensor
