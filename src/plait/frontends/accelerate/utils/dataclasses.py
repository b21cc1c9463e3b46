"""`accelerate.utils.dataclasses`: plugins, handlers, and the enums of their values."""

from __future__ import annotations

from enum import StrEnum

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

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
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
]


class _ListedEnum(StrEnum):
    @classmethod
    def list(cls) -> list[str]:
        """Return all values."""
        return [member.value for member in cls]


class PrecisionType(_ListedEnum):
    """Values of `mixed_precision`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(_ListedEnum):
    """Values of `log_with` that Accelerate has."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class RNGType(_ListedEnum):
    """Values of `rng_types`."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class DynamoBackend(_ListedEnum):
    """Values of `dynamo_backend`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
