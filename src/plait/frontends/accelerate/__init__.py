"""Accelerate's API on Plait's engine: `from plait.frontends.accelerate import Accelerator`.

Names are loaded on first use, so that translating a configuration needs no torch.
"""

from typing import TYPE_CHECKING

from plait.frontends.accelerate.missing_names import ACCELERATE, not_offered

if TYPE_CHECKING:
    from plait.frontends.accelerate.accelerator import Accelerator as Accelerator
    from plait.frontends.accelerate.config import as_overrides as as_overrides
    from plait.frontends.accelerate.config import is_accelerate as is_accelerate
    from plait.frontends.accelerate.config import machines as machines
    from plait.frontends.accelerate.config import processes as processes
    from plait.frontends.accelerate.config import translate as translate
    from plait.frontends.accelerate.data_loader import skip_first_batches as skip_first_batches
    from plait.frontends.accelerate.optimizer import PreparedOptimizer as PreparedOptimizer
    from plait.frontends.accelerate.prepared import Gatherer as Gatherer
    from plait.frontends.accelerate.prepared import PreparedModel as PreparedModel
    from plait.frontends.accelerate.prepared import backward as backward
    from plait.frontends.accelerate.prepared import build_engine as build_engine
    from plait.frontends.accelerate.process import PartialState as PartialState
    from plait.frontends.accelerate.settings import build_config as build_config
    from plait.frontends.accelerate.settings import merged as merged
    from plait.frontends.accelerate.state_files import PLACED as PLACED
    from plait.frontends.accelerate.state_files import full_weights as full_weights
    from plait.frontends.accelerate.state_files import groups_of as groups_of
    from plait.frontends.accelerate.state_files import pack as pack
    from plait.frontends.accelerate.state_files import restore_groups as restore_groups
    from plait.frontends.accelerate.state_files import unpack as unpack
    from plait.frontends.accelerate.utils.dataclasses import AutocastKwargs as AutocastKwargs
    from plait.frontends.accelerate.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
    from plait.frontends.accelerate.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
    from plait.frontends.accelerate.utils.dataclasses import DeepSpeedPlugin as DeepSpeedPlugin
    from plait.frontends.accelerate.utils.dataclasses import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from plait.frontends.accelerate.utils.dataclasses import DistributedType as DistributedType
    from plait.frontends.accelerate.utils.dataclasses import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from plait.frontends.accelerate.utils.dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin
    from plait.frontends.accelerate.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
    from plait.frontends.accelerate.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
    from plait.frontends.accelerate.utils.dataclasses import ParallelismConfig as ParallelismConfig
    from plait.frontends.accelerate.utils.dataclasses import ProfileKwargs as ProfileKwargs
    from plait.frontends.accelerate.utils.dataclasses import ProjectConfiguration as ProjectConfiguration
    from plait.frontends.accelerate.utils.dataclasses import TorchDynamoPlugin as TorchDynamoPlugin
    from plait.frontends.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
    from plait.frontends.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
else:
    from plait.lazy import attach_names

    attach_names(__name__, unknown=not_offered)

ACCELERATE.install()
