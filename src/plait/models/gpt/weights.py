"""GPT-2 weights in the names and layout of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

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


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` GPT-2 folder into a `Gpt` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    causal_masks = r"\.attn\.(masked_)?bias$"  # buffers, in old files
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[causal_masks, *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Our tensors for one of `GPT2LMHeadModel`, which joins q, k and v and stores matrices transposed."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    if tensor.ndim == 2 and re.search(r"(attention|ffn|c_attn)\.", name):
        tensor = tensor.t()
    if ".attn.c_attn." in name:
        for part, piece in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace(".attn.c_attn.", f".attention.{part}."), piece.contiguous()
    else:
        yield name, tensor.contiguous()
