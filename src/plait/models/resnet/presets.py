"""Named depths, as keywords of `ResNetConfig`, and the blocks that each depth has in its four stages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

STAGES: Mapping[int, tuple[int, int, int, int]] = MappingProxyType(
    {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{f"resnet{depth}": {"depth": depth} for depth in STAGES},
        "cifar10": {"depth": 18, "classes": 10, "stem": "cifar"},
    }
)
