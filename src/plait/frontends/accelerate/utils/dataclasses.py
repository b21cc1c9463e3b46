"""`accelerate.utils.dataclasses`: plugins, handlers, and the words that they know."""

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
        """All of them."""
        return [member.value for member in cls]


class PrecisionType(_ListedEnum):
    """What `mixed_precision` may be."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(_ListedEnum):
    """What `log_with` may be, of the names that Accelerate has."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class RNGType(_ListedEnum):
    """What `rng_types` may be."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class DynamoBackend(_ListedEnum):
    """What `dynamo_backend` may be."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
