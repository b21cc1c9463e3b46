"""`accelerate.utils.dataclasses`: plugins, handlers, and the enums of their values.

A plugin's `as_config` returns the same keys as an `accelerate` YAML, so one translation serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from plait.errors import ConfigError, Problem
from plait.frontends.accelerate.config import SHARDING


class DistributedType(StrEnum):
    """`Accelerator.distributed_type`: whether there are several ranks, and whether each has the full model."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    FSDP = "FSDP"
    """Weights, gradients or optimizer states are sharded, however that was configured."""
    DEEPSPEED = "DEEPSPEED"
    """Never returned: scripts would then use DeepSpeed's engine, which is not there."""


@dataclass
class GradientAccumulationPlugin:
    """How gradients accumulate over micro-batches."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    """No effect: the ZeRO stage decides what is kept between micro-batches."""


@dataclass
class DataLoaderConfiguration:
    """How the batches of loaders are divided between ranks."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    """No effect: the position of a loader is always saved and restored, see `skip_first_batches`."""


@dataclass
class ProjectConfiguration:
    """The folders that a script writes to."""

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the folder to write to."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


_FSDP_KEYS = {
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "cpu_offload": "fsdp_offload_params",
}


@dataclass
class FullyShardedDataParallelPlugin:
    """FSDP, 1 or 2. Values may be torch's own (`ShardingStrategy.FULL_SHARD`) or their names."""

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def as_config(self) -> dict[str, Any]:
        """Return the keys of an `accelerate` YAML."""
        section = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in ("mixed_precision_policy", "fsdp_version"):
                section[_FSDP_KEYS.get(field.name, f"fsdp_{field.name}")] = _plain_value(value)
        section["fsdp_version"] = self.fsdp_version or 1
        return {"distributed_type": "FSDP", "fsdp_config": section}

    def precision(self) -> dict[str, str]:
        """Return the section `precision` for the mixed-precision policy."""
        policy = self.mixed_precision_policy
        if policy is None:
            return {}
        if isinstance(policy, str):
            return {"compute": policy, "reduce": policy if policy != "tf32" else "fp32"}
        given = dict(policy) if isinstance(policy, Mapping) else vars(policy)
        wanted = {"compute": given.get("param_dtype"), "reduce": given.get("reduce_dtype")}
        return {key: _DTYPES[str(dtype).rpartition(".")[2]] for key, dtype in wanted.items() if dtype is not None}


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_POLICIES = {
    "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
}


def _plain_value(value: Any) -> Any:
    """Return the YAML value for a policy, function or enum member of torch."""
    name = getattr(getattr(value, "func", value), "__name__", None)  # partial(size_based_auto_wrap_policy, …)
    if name in _POLICIES:
        return _POLICIES[name]
    if hasattr(value, "offload_params"):
        return bool(value.offload_params)
    if type(value).__name__ == "CPUOffloadPolicy":
        return True
    name = getattr(value, "name", value)  # an enum member's name
    return name.lstrip("_") if isinstance(name, str) and name.lstrip("_") in SHARDING else name


@dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed: a configuration (`hf_ds_config`), or single arguments."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None

    def as_config(self) -> dict[str, Any]:
        """Return the keys of an `accelerate` YAML."""
        names = {"hf_ds_config": "deepspeed_config_file", "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names"}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        section = {names.get(name, name): value for name, value in given.items() if value is not None}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": section or {"zero_stage": 2}}

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration, which scripts read."""
        from plait.frontends.accelerate.config import deepspeed_config
        from plait.frontends.deepspeed import read_config

        if self.hf_ds_config is not None:
            return read_config(self.hf_ds_config)
        section: dict[str, Any] = self.as_config()["deepspeed_config"]
        return deepspeed_config(section)


@dataclass
class ParallelismConfig:
    """Sizes of the mesh axes."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1

    def as_config(self) -> dict[str, Any]:
        """Return the keys of an `accelerate` YAML."""
        sizes = {f"parallelism_config_{field.name}": getattr(self, field.name) for field in fields(self)}
        return {"parallelism_config": sizes}


@dataclass
class TorchDynamoPlugin:
    """Options of `torch.compile`."""

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    use_regional_compilation: bool = False

    def as_config(self) -> dict[str, Any]:
        """Return the keys of an `accelerate` YAML."""
        section: dict[str, Any] = {"dynamo_backend": str(getattr(self.backend, "value", self.backend))}
        names = {"mode": "dynamo_mode", "fullgraph": "dynamo_use_fullgraph", "dynamic": "dynamo_use_dynamic"}
        names["use_regional_compilation"] = "dynamo_use_regional_compilation"
        section.update({key: value for name, key in names.items() if (value := getattr(self, name))})
        return {"dynamo_config": section}


class DDPCommunicationHookType(StrEnum):
    """How DistributedDataParallel reduces gradients. PowerSGD is refused."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs:
    """Options of DistributedDataParallel. Only the bucket size and the reduction dtype have an effect."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] | None = None

    def sections(self) -> dict[str, Any]:
        """Return the sections of the run description that they set."""
        sections: dict[str, Any] = {"strategy": {"bucket_mb": float(self.bucket_cap_mb)}}
        hooks = {name: str(getattr(self, name) or "no").lower() for name in ("comm_hook", "comm_wrapper")}
        for name, hook in hooks.items():
            if hook not in ("no", "fp16", "bf16"):
                message = f"{hook} is not supported: gradients are reduced in their own dtype, in fp16 or in bf16"
                remedy = "Leave it out, or write DDPCommunicationHookType.BF16."
                raise ConfigError(Problem(f"DistributedDataParallelKwargs.{name}", message, remedy))
        dtypes = sorted({hook for hook in hooks.values() if hook != "no"})
        if len(dtypes) > 1:
            message = f"comm_hook is {hooks['comm_hook']}, but comm_wrapper is {hooks['comm_wrapper']}"
            raise ConfigError(Problem("DistributedDataParallelKwargs", message, "Set one dtype for both."))
        if dtypes:
            sections["precision"] = {"reduce": dtypes[0]}
        return sections


@dataclass
class GradScalerKwargs:
    """Options of the fp16 loss scaler."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs:
    """Backend and timeout of the process group."""

    backend: str | None = None
    timeout: timedelta | None = None

    def sections(self) -> dict[str, Any]:
        """Return the sections of the run description that they set."""
        sections: dict[str, Any] = {}
        if self.backend is not None:
            sections["backend"] = self.backend
        if self.timeout is not None:
            sections["timeout_s"] = self.timeout.total_seconds()
        return sections


@dataclass
class AutocastKwargs:
    """Arguments of `accelerator.autocast()`."""

    enabled: bool = True
    cache_enabled: bool | None = None


# `accelerator.profile()`: torch's profiler.


_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


@dataclass
class ProfileKwargs:
    """Options of `torch.profiler.profile`."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def build(self) -> profile:
        """Return the profiler with these options."""
        unknown = [activity for activity in self.activities or () if activity not in _ACTIVITIES]
        if unknown:
            remedy = f"Write {', '.join(_ACTIVITIES)}."
            raise ConfigError(Problem("ProfileKwargs.activities", f"{unknown[0]!r} is not an activity", remedy))
        return profile(
            activities=None if self.activities is None else [_ACTIVITIES[activity] for activity in self.activities],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def export(self, profiler: profile, rank: int) -> None:
        """Write the trace, one file per rank, if `output_trace_dir` is set."""
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))


# Enums of the values of some arguments.


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
