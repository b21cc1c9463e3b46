"""ColossalAI's ways to spread, each told what the run description says."""

from __future__ import annotations

import importlib
from typing import Any

from plait.config import RunConfig
from plait.errors import ConfigError, Problem

_CLASSES = {
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid": "HybridParallelPlugin",
    "torch_ddp": "TorchDDPPlugin",
    "torch_fsdp": "TorchFSDPPlugin",
}
_NO_LIMIT = 1e30
"""Gemini measures the norm of gradients only where it clips."""


def make_plugin(config: RunConfig) -> Any:
    """The plugin of `strategy.plugin`, with the options of `strategy.config`."""
    plugin = config.strategy.plugin
    assert plugin is not None
    options = {**_said_by_the_run(config), **(config.strategy.config or {})}
    kind = getattr(importlib.import_module("colossalai.booster.plugin"), _CLASSES[plugin])
    try:
        made = kind(**options)
    except (TypeError, AssertionError) as error:
        message = f"{_CLASSES[plugin]} says: {error}"
        raise ConfigError(Problem("strategy.config", message, "See the options of the plugin.")) from None
    if plugin == "torch_fsdp":
        made.fsdp_kwargs["use_orig_params"] = True  # or all parameters would be one group, with one weight decay
    return made


def _said_by_the_run(config: RunConfig) -> dict[str, Any]:
    precision = "fp32" if config.precision.compute == "tf32" else config.precision.compute
    clip, stage = config.train.clip_norm, config.strategy.stage
    match config.strategy.plugin:
        case "low_level_zero":
            return {"stage": stage, "precision": precision, "max_norm": clip or 0.0, "cast_inputs": False}
        case "gemini":
            return {"precision": precision, "max_norm": clip or _NO_LIMIT, "strict_ddp_mode": False}
        case "hybrid":
            return {
                "tp_size": 1,
                "pp_size": 1,
                "zero_stage": stage,
                "precision": precision,
                "max_norm": clip or 0.0,
                "custom_policy": _no_policy(),
            }
        case "torch_fsdp":
            return {"mixed_precision": _fsdp_formats(config)}
        case _:
            return {"broadcast_buffers": False}


def _fsdp_formats(config: RunConfig) -> Any:
    from torch.distributed.fsdp import MixedPrecision

    from plait.precision import make_policy

    policy = make_policy(config.precision)
    return MixedPrecision(param_dtype=policy.compute, reduce_dtype=policy.reduce) if policy.mixed else None


def _no_policy() -> Any:
    """What the plugin wants to know of a model that it does not cut: nothing."""
    base: Any = importlib.import_module("colossalai.shardformer.policies.base_policy").Policy

    class Whole(base):  # type: ignore[misc]
        """Leaves a model as it is."""

        def config_sanity_check(self) -> None:
            """Nothing to check."""

        def preprocess(self) -> Any:
            """Nothing to prepare."""
            return self.model

        def module_policy(self) -> dict[Any, Any]:
            """Nothing to replace."""
            return {}

        def postprocess(self) -> Any:
            """Nothing to put right."""
            return self.model

        def get_held_layers(self) -> list[Any]:
            """All of it."""
            return [self.model]

    return Whole()
