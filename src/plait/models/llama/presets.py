"""Named sizes, as keywords of `LlamaConfig`. The larger ones have the shapes of the published Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "kv_heads": 8, "rope_base": 500000.0, "seq_len": 8192}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 64},
        "160m": {"vocab_size": 32000, "dim": 768, "layers": 12, "heads": 12, "ffn_dim": 3072, "seq_len": 2048},
        "1b": _LLAMA3 | {"dim": 2048, "layers": 16, "heads": 32, "ffn_dim": 8192, "tie_embeddings": True},
        "3b": _LLAMA3 | {"dim": 3072, "layers": 28, "heads": 24, "ffn_dim": 8192, "tie_embeddings": True},
        "8b": _LLAMA3 | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336},
        "70b": _LLAMA3 | {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28672},
    }
)
