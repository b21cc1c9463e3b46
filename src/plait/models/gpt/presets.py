"""Named sizes, as keywords of `GptConfig`: a tiny one, and the four that GPT-2 was published in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "seq_len": 64},
        "small": {"dim": 768, "layers": 12, "heads": 12},
        "medium": {"dim": 1024, "layers": 24, "heads": 16},
        "large": {"dim": 1280, "layers": 36, "heads": 20},
        "xl": {"dim": 1600, "layers": 48, "heads": 25},
    }
)
