"""What `TrainingArguments` say about how training is spread, as a run description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import RunConfig
from plait.errors import ConfigError, Problem
from plait.frontends import KeyOutcome, KeyReport
from plait.frontends.accelerate import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    build_config,
    merged,
)

_TRAINERS = {
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "steps_per_print": "logging_steps",
    "wall_clock_breakdown": "the Trainer's own times",
}
"""Keys of a DeepSpeed configuration that the Trainer itself sees to, and by which argument."""
_MADE = ("optimizer", "scheduler")


def config_of(args: Any, sections: Mapping[str, Any] | None) -> tuple[RunConfig, KeyReport]:
    """The run description of a Trainer's arguments; `sections`, in Plait's own words, stand over it."""
    plugins: list[Any] = []
    if args.fsdp_plugin_args is not None:
        plugins.append(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    precision = args.mixed_precision
    own: dict[str, Any] = {"seed": args.seed, "deterministic": bool(args.full_determinism)}
    if args.deepspeed:
        theirs = _with_precision(_deepspeed(args), precision)
        plugins.append(DeepSpeedPlugin(hf_ds_config=theirs))
        precision = None  # its sections say it now
        own["precision"] = {"cast_inputs": True}  # as the Trainer itself does under DeepSpeed
    if getattr(args, "torch_compile", False):
        plugins.append(TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode))
    if args.parallelism_config is not None:
        raise ConfigError(
            Problem(
                "parallelism_config",
                "its sizes are read from `sections` here",
                "Write PlaitTrainer(…, sections={'strategy': {'layout': {'tp': 2}}}).",
            )
        )
    handlers = []
    if args.ddp_bucket_cap_mb is not None:
        handlers.append(DistributedDataParallelKwargs(bucket_cap_mb=args.ddp_bucket_cap_mb))
    own = merged(own, sections or {})
    if args.ddp_timeout:
        own.setdefault("timeout_s", float(args.ddp_timeout))
    if args.tf32 and args.mixed_precision == "no":
        own.setdefault("precision", "tf32")
    config, report = build_config(
        None,
        plugins,
        handlers,
        mixed_precision=precision,
        cpu=args.use_cpu,
        sections=own,
    )
    for key, value in deepspeed_of(args).items():
        if key in _TRAINERS:
            report.add(KeyOutcome.MAPPED, key, value, f"the Trainer sees to it: {_TRAINERS[key]}")
        elif key in _MADE:
            report.add(KeyOutcome.HONOURED, key, value, "made as DeepSpeed makes it, in the Trainer's loop")
    return config, report


def deepspeed_of(args: Any) -> dict[str, Any]:
    """The DeepSpeed configuration of a Trainer, its open values filled from the arguments; empty without one."""
    return dict(args.hf_deepspeed_config.config) if args.deepspeed else {}


def refuse_mismatches(args: Any) -> None:
    """Where configuration and arguments say different things, name both."""
    if args.deepspeed and args.hf_deepspeed_config.mismatches:
        found = [each.removeprefix("- ") for each in dict.fromkeys(args.hf_deepspeed_config.mismatches)]
        message = f"it disagrees with TrainingArguments: {'; '.join(found)}"
        raise ConfigError(Problem("deepspeed", message, "Write 'auto' there, or the same value."))


def _with_precision(config: dict[str, Any], asked: str) -> dict[str, Any]:
    """DeepSpeed's configuration, completed for the format that `bf16` or `fp16` of the arguments asks for.

    As Accelerate does it: a section that is absent is added, switched on. One that is there without `enabled` stays
    off with Accelerate, which then trains in fp32 without a word; that is an error here.
    """
    if asked == "no":
        return config
    if asked not in config:
        return {**config, asked: {"enabled": True, "auto_cast": True} if asked == "fp16" else {"enabled": True}}
    section = config[asked]
    if not (isinstance(section, Mapping) and section.get("enabled")):
        message = f"it is not switched on by {section!r}, and TrainingArguments have {asked}=True"
        raise ConfigError(Problem(f"deepspeed.{asked}.enabled", message, "Write 'auto' or true there."))
    return config


def _deepspeed(args: Any) -> dict[str, Any]:
    """DeepSpeed's configuration without what the Trainer itself does, batch sizes and clipping for example."""
    refuse_mismatches(args)
    return {key: value for key, value in deepspeed_of(args).items() if key not in (*_TRAINERS, *_MADE)}
