"""Accelerate's words, on Plait's engine: `from plait.frontends.accelerate import Accelerator`.

Names are loaded on first use: translating a configuration needs no torch.
"""

from typing import TYPE_CHECKING

from plait.frontends.accelerate.absent import explain_absent_modules, not_offered

if TYPE_CHECKING:
    from plait.frontends.accelerate.accelerator import Accelerator as Accelerator
    from plait.frontends.accelerate.config import translate as translate
    from plait.frontends.accelerate.loader import skip_first_batches as skip_first_batches
    from plait.frontends.accelerate.plugins import AutocastKwargs as AutocastKwargs
    from plait.frontends.accelerate.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from plait.frontends.accelerate.plugins import DDPCommunicationHookType as DDPCommunicationHookType
    from plait.frontends.accelerate.plugins import DeepSpeedPlugin as DeepSpeedPlugin
    from plait.frontends.accelerate.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from plait.frontends.accelerate.plugins import DistributedType as DistributedType
    from plait.frontends.accelerate.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from plait.frontends.accelerate.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from plait.frontends.accelerate.plugins import GradScalerKwargs as GradScalerKwargs
    from plait.frontends.accelerate.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from plait.frontends.accelerate.plugins import ParallelismConfig as ParallelismConfig
    from plait.frontends.accelerate.plugins import ProjectConfiguration as ProjectConfiguration
    from plait.frontends.accelerate.process import PartialState as PartialState
    from plait.frontends.accelerate.profiling import ProfileKwargs as ProfileKwargs
    from plait.frontends.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
    from plait.frontends.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
else:
    from plait.lazy import attach

    attach(
        __name__,
        {
            "accelerator": ["Accelerator"],
            "config": ["translate"],
            "loader": ["skip_first_batches"],
            "plugins": [
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
                "ProjectConfiguration",
            ],
            "process": ["PartialState"],
            "profiling": ["ProfileKwargs"],
            "utils.memory": ["find_executable_batch_size"],
            "utils.random": ["synchronize_rng_states"],
        },
        unknown=not_offered,
    )

explain_absent_modules()
