"""Accelerate's words, on Plait's engine: `from plait.frontends.accelerate import Accelerator`.

Names are loaded on first use: translating a configuration needs no torch.
"""

from typing import TYPE_CHECKING, Any

from plait.frontends.accelerate.absent import explain_absent_modules, not_offered

if TYPE_CHECKING:
    from plait.frontends.accelerate.accelerator import Accelerator
    from plait.frontends.accelerate.config import translate
    from plait.frontends.accelerate.loader import skip_first_batches
    from plait.frontends.accelerate.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
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
    from plait.frontends.accelerate.profiling import ProfileKwargs
    from plait.frontends.accelerate.utils.memory import find_executable_batch_size
    from plait.frontends.accelerate.utils.random import synchronize_rng_states

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
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
    "ProfileKwargs",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "skip_first_batches",
    "synchronize_rng_states",
    "translate",
]

_HOMES = {
    "Accelerator": "accelerator",
    "PartialState": "process",
    "ProfileKwargs": "profiling",
    "find_executable_batch_size": "utils.memory",
    "skip_first_batches": "loader",
    "synchronize_rng_states": "utils.random",
    "translate": "config",
}

explain_absent_modules()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise not_offered(__name__, name)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'plugins')}"), name)
