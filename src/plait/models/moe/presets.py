"""Named sizes, as keywords of `MoeConfig`. The larger ones have the shapes of the published Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_MIXTRAL: dict[str, Any] = {"vocab_size": 32000, "kv_heads": 8, "rope_base": 1e6, "experts": 8, "top_k": 2}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "vocab_size": 256,
            "dim": 64,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "seq_len": 64,
            "experts": 4,
            "expert_dim": 64,
        },
        "8x7b": _MIXTRAL | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336, "seq_len": 32768},
        "8x22b": _MIXTRAL | {"dim": 6144, "layers": 56, "heads": 48, "ffn_dim": 16384, "seq_len": 65536},
    }
)
