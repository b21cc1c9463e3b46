"""`accelerate.utils`: its functions and classes, in modules of Accelerate's names."""

from __future__ import annotations

from typing import Any

from plait.frontends.accelerate.missing_names import not_offered
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
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from plait.frontends.accelerate.utils.dataclasses import DynamoBackend, LoggerType, PrecisionType, RNGType
from plait.frontends.accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from plait.frontends.accelerate.utils.imports import (
    is_bf16_available,
    is_cuda_available,
    is_datasets_available,
    is_deepspeed_available,
    is_megatron_lm_available,
    is_mps_available,
    is_npu_available,
    is_peft_available,
    is_rich_available,
    is_tensorboard_available,
    is_torch_xla_available,
    is_transformers_available,
    is_wandb_available,
    is_xpu_available,
)
from plait.frontends.accelerate.utils.memory import find_executable_batch_size, release_memory
from plait.frontends.accelerate.utils.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
)
from plait.frontends.accelerate.utils.other import (
    extract_model_from_parallel,
    is_compiled_module,
    save,
    wait_for_everyone,
)
from plait.frontends.accelerate.utils.random import set_seed, synchronize_rng_state, synchronize_rng_states
from plait.frontends.accelerate.utils.tqdm import tqdm
from plait.frontends.accelerate.utils.versions import compare_versions, is_torch_version

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "compare_versions",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "is_bf16_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_megatron_lm_available",
    "is_mps_available",
    "is_npu_available",
    "is_peft_available",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
