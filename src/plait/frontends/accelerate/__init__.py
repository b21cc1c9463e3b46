"""Accelerate's words, on Plait's engine: `from plait.frontends.accelerate import Accelerator`.

Names are loaded on first use: translating a configuration needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.frontends.accelerate.accelerator import Accelerator
    from plait.frontends.accelerate.config import translate
    from plait.frontends.accelerate.loader import skip_first_batches
    from plait.frontends.accelerate.memory import find_executable_batch_size
    from plait.frontends.accelerate.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ParallelismConfig,
        ProjectConfiguration,
    )
    from plait.frontends.accelerate.process import PartialState

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "skip_first_batches",
    "translate",
]

_HOMES = {
    "Accelerator": "accelerator",
    "PartialState": "process",
    "find_executable_batch_size": "memory",
    "skip_first_batches": "loader",
    "translate": "config",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'plugins')}"), name)
