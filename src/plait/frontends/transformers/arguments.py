"""Translates `TrainingArguments` into a run description: strategy, precision and seeds."""

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

_TRAINER_KEYS = {
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "steps_per_print": "logging_steps",
    "wall_clock_breakdown": "the Trainer's own times",
}
"""Keys of a DeepSpeed configuration that the Trainer itself honours, each with its argument of the Trainer."""
_BUILT_KEYS = ("optimizer", "scheduler")


def config_of(args: Any, sections: Mapping[str, Any] | None) -> tuple[RunConfig, KeyReport]:
    """Return the run description of a Trainer's arguments, and the report on keys; `sections` take precedence.

    `sections` are sections of a run description.
    """
    plugins: list[Any] = []
    if args.fsdp_plugin_args is not None:
        plugins.append(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    precision = args.mixed_precision
    settings: dict[str, Any] = {"seed": args.seed, "deterministic": bool(args.full_determinism)}
    if args.deepspeed:
        deepspeed = _with_precision(_translated_keys(args), precision)
        plugins.append(DeepSpeedPlugin(hf_ds_config=deepspeed))
        precision = None  # now in the sections of the DeepSpeed configuration
        settings["precision"] = {"cast_inputs": True}  # as the Trainer itself does under DeepSpeed
    if getattr(args, "torch_compile", False):
        plugins.append(TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode))
    if args.parallelism_config is not None:
        raise ConfigError(
            Problem(
                "parallelism_config",
                "is read from `sections` here",
                "Write PlaitTrainer(…, sections={'strategy': {'layout': {'tp': 2}}}).",
            )
        )
    handlers = []
    if args.ddp_bucket_cap_mb is not None:
        handlers.append(DistributedDataParallelKwargs(bucket_cap_mb=args.ddp_bucket_cap_mb))
    settings = merged(settings, sections or {})
    if args.ddp_timeout:
        settings.setdefault("timeout_s", float(args.ddp_timeout))
    if args.tf32 and args.mixed_precision == "no":
        settings.setdefault("precision", "tf32")
    config, report = build_config(
        None,
        plugins,
        handlers,
        mixed_precision=precision,
        cpu=args.use_cpu,
        sections=settings,
    )
    for key, value in deepspeed_of(args).items():
        if key in _TRAINER_KEYS:
            report.add(KeyOutcome.MAPPED, key, value, f"the Trainer honours it: {_TRAINER_KEYS[key]}")
        elif key in _BUILT_KEYS:
            report.add(KeyOutcome.HONOURED, key, value, "built as by DeepSpeed, in the Trainer's loop")
    return config, report


def deepspeed_of(args: Any) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a Trainer, with `auto` replaced by its arguments; {} without one."""
    return dict(args.hf_deepspeed_config.config) if args.deepspeed else {}


def refuse_mismatches(args: Any) -> None:
    """Raise `ConfigError` if the DeepSpeed configuration and the arguments differ; the message has both values."""
    if args.deepspeed and args.hf_deepspeed_config.mismatches:
        mismatches = [line.removeprefix("- ") for line in dict.fromkeys(args.hf_deepspeed_config.mismatches)]
        message = f"it disagrees with TrainingArguments: {'; '.join(mismatches)}"
        raise ConfigError(Problem("deepspeed", message, "Write 'auto' there, or the same value."))


def _with_precision(config: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return the configuration with the section of the arguments' precision (`bf16` or `fp16`) enabled.

    As in Accelerate, an absent section is added. With a section that is not `enabled`, Accelerate silently trains in
    fp32; here it raises `ConfigError`.
    """
    if precision == "no":
        return config
    if precision not in config:
        return {**config, precision: {"enabled": True, "auto_cast": True} if precision == "fp16" else {"enabled": True}}
    section = config[precision]
    if not (isinstance(section, Mapping) and section.get("enabled")):
        message = f"it is not switched on by {section!r}, and TrainingArguments have {precision}=True"
        raise ConfigError(Problem(f"deepspeed.{precision}.enabled", message, "Write 'auto' or true there."))
    return config


def _translated_keys(args: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration without the keys that the Trainer itself honours."""
    refuse_mismatches(args)
    return {key: value for key, value in deepspeed_of(args).items() if key not in (*_TRAINER_KEYS, *_BUILT_KEYS)}
