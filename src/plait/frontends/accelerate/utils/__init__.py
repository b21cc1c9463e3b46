"""`accelerate.utils`: its functions and classes, in modules named as in Accelerate. Loaded on first use."""

from typing import TYPE_CHECKING

from plait.frontends.accelerate.missing_names import not_offered

if TYPE_CHECKING:
    from plait.frontends.accelerate.utils.dataclasses import AutocastKwargs as AutocastKwargs
    from plait.frontends.accelerate.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
    from plait.frontends.accelerate.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
    from plait.frontends.accelerate.utils.dataclasses import DeepSpeedPlugin as DeepSpeedPlugin
    from plait.frontends.accelerate.utils.dataclasses import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from plait.frontends.accelerate.utils.dataclasses import DistributedType as DistributedType
    from plait.frontends.accelerate.utils.dataclasses import DynamoBackend as DynamoBackend
    from plait.frontends.accelerate.utils.dataclasses import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from plait.frontends.accelerate.utils.dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin
    from plait.frontends.accelerate.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
    from plait.frontends.accelerate.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
    from plait.frontends.accelerate.utils.dataclasses import LoggerType as LoggerType
    from plait.frontends.accelerate.utils.dataclasses import ParallelismConfig as ParallelismConfig
    from plait.frontends.accelerate.utils.dataclasses import PrecisionType as PrecisionType
    from plait.frontends.accelerate.utils.dataclasses import ProfileKwargs as ProfileKwargs
    from plait.frontends.accelerate.utils.dataclasses import ProjectConfiguration as ProjectConfiguration
    from plait.frontends.accelerate.utils.dataclasses import RNGType as RNGType
    from plait.frontends.accelerate.utils.dataclasses import TorchDynamoPlugin as TorchDynamoPlugin
    from plait.frontends.accelerate.utils.deepspeed import DummyOptim as DummyOptim
    from plait.frontends.accelerate.utils.deepspeed import DummyScheduler as DummyScheduler
    from plait.frontends.accelerate.utils.imports import is_bf16_available as is_bf16_available
    from plait.frontends.accelerate.utils.imports import is_cuda_available as is_cuda_available
    from plait.frontends.accelerate.utils.imports import is_datasets_available as is_datasets_available
    from plait.frontends.accelerate.utils.imports import is_deepspeed_available as is_deepspeed_available
    from plait.frontends.accelerate.utils.imports import is_megatron_lm_available as is_megatron_lm_available
    from plait.frontends.accelerate.utils.imports import is_mps_available as is_mps_available
    from plait.frontends.accelerate.utils.imports import is_npu_available as is_npu_available
    from plait.frontends.accelerate.utils.imports import is_peft_available as is_peft_available
    from plait.frontends.accelerate.utils.imports import is_rich_available as is_rich_available
    from plait.frontends.accelerate.utils.imports import is_tensorboard_available as is_tensorboard_available
    from plait.frontends.accelerate.utils.imports import is_torch_xla_available as is_torch_xla_available
    from plait.frontends.accelerate.utils.imports import is_transformers_available as is_transformers_available
    from plait.frontends.accelerate.utils.imports import is_wandb_available as is_wandb_available
    from plait.frontends.accelerate.utils.imports import is_xpu_available as is_xpu_available
    from plait.frontends.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
    from plait.frontends.accelerate.utils.memory import release_memory as release_memory
    from plait.frontends.accelerate.utils.operations import broadcast as broadcast
    from plait.frontends.accelerate.utils.operations import broadcast_object_list as broadcast_object_list
    from plait.frontends.accelerate.utils.operations import concatenate as concatenate
    from plait.frontends.accelerate.utils.operations import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from plait.frontends.accelerate.utils.operations import convert_to_fp32 as convert_to_fp32
    from plait.frontends.accelerate.utils.operations import find_batch_size as find_batch_size
    from plait.frontends.accelerate.utils.operations import gather as gather
    from plait.frontends.accelerate.utils.operations import gather_object as gather_object
    from plait.frontends.accelerate.utils.operations import listify as listify
    from plait.frontends.accelerate.utils.operations import pad_across_processes as pad_across_processes
    from plait.frontends.accelerate.utils.operations import recursively_apply as recursively_apply
    from plait.frontends.accelerate.utils.operations import reduce as reduce
    from plait.frontends.accelerate.utils.operations import send_to_device as send_to_device
    from plait.frontends.accelerate.utils.other import extract_model_from_parallel as extract_model_from_parallel
    from plait.frontends.accelerate.utils.other import is_compiled_module as is_compiled_module
    from plait.frontends.accelerate.utils.other import save as save
    from plait.frontends.accelerate.utils.other import wait_for_everyone as wait_for_everyone
    from plait.frontends.accelerate.utils.random import set_seed as set_seed
    from plait.frontends.accelerate.utils.random import synchronize_rng_state as synchronize_rng_state
    from plait.frontends.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
    from plait.frontends.accelerate.utils.tqdm import tqdm as tqdm
    from plait.frontends.accelerate.utils.versions import compare_versions as compare_versions
    from plait.frontends.accelerate.utils.versions import is_torch_version as is_torch_version
else:
    from plait.lazy import attach_names

    attach_names(__name__, unknown=not_offered)
