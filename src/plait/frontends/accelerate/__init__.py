"""Accelerate's words, on Plait's engine: `from plait.frontends.accelerate import Accelerator`.

Names are loaded on first use: translating a configuration needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.frontends.accelerate.accelerator import Accelerator
    from plait.frontends.accelerate.config import translate
    from plait.frontends.accelerate.plugins import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
        ProjectConfiguration,
    )

__all__ = [
    "Accelerator",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "FullyShardedDataParallelPlugin",
    "GradientAccumulationPlugin",
    "ParallelismConfig",
    "ProjectConfiguration",
    "translate",
]

_HOMES = {"Accelerator": "accelerator", "translate": "config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'plugins')}"), name)
