"""How ranks share the layers of a decoder: what Plait's own have in common."""

from __future__ import annotations

from collections.abc import Mapping


def decoder_plan(feed_forward: Mapping[str, str]) -> dict[str, str]:
    """Attention by heads, the vocabulary by words, and the feed-forwards as said.

    The words are those of `parallel.tensor`; `feed_forward` gives them to names of modules or patterns.
    """
    return {
        "embedding": "vocab_embedding",
        "blocks.*": "block",
        "blocks.*.attention_norm": "sequence",
        "blocks.*.attention": "region",
        "blocks.*.attention.q": "heads",
        "blocks.*.attention.k": "kv_heads",
        "blocks.*.attention.v": "kv_heads",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.ffn_norm": "sequence",
        **feed_forward,
        "head": "vocab_head",
    }
