"""What `TrainingArguments` say about how training is spread, as a run description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import RunConfig
from plait.errors import ConfigError, Problem
from plait.frontends.accelerate.plugins import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from plait.frontends.accelerate.settings import build_config
from plait.frontends.account import Account

_TRAINERS = {
    "optimizer": "learning_rate, optim, weight_decay",
    "scheduler": "lr_scheduler_type, warmup_steps",
}
_COUNTED_BY_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
)


def config_of(args: Any, sections: Mapping[str, Any] | None) -> tuple[RunConfig, Account]:
    """The run description of a Trainer's arguments; `sections`, in Plait's own words, stand over it."""
    plugins: list[Any] = []
    if args.fsdp_plugin_args is not None:
        plugins.append(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    precision = args.mixed_precision
    if args.deepspeed:
        theirs = _deepspeed(args)
        plugins.append(DeepSpeedPlugin(hf_ds_config=theirs))
        if theirs.keys() & {"bf16", "bfloat16", "fp16"}:
            precision = None  # the Trainer has compared the two already
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
    own: dict[str, Any] = {"seed": args.seed, "deterministic": bool(args.full_determinism), **(sections or {})}
    if args.ddp_timeout:
        own.setdefault("timeout_s", float(args.ddp_timeout))
    if args.tf32 and args.mixed_precision == "no":
        own.setdefault("precision", "tf32")
    return build_config(
        None,
        plugins,
        handlers,
        mixed_precision=precision,
        cpu=args.use_cpu,
        sections=own,
    )


def _deepspeed(args: Any) -> dict[str, Any]:
    """DeepSpeed's configuration without what the Trainer itself does, batch sizes and clipping for example."""
    config = dict(args.hf_deepspeed_config.config)
    problems = [
        Problem(f"deepspeed.{key}", "the Trainer makes it from its own arguments", f"Leave it out; set {words}.")
        for key, words in _TRAINERS.items()
        if key in config
    ]
    if problems:
        raise ConfigError(problems)
    return {key: value for key, value in config.items() if key not in _COUNTED_BY_TRAINER}
