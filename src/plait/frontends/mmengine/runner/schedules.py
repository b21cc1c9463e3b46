"""From `param_scheduler` to schedules, and the rates scaled to the size of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim.scheduler import ParamScheduler
from plait.frontends.mmengine.registry import PARAM_SCHEDULERS


def build_schedulers(runner: Any, cfg: Any) -> list[Any]:
    """The schedules of a run, over its optim wrapper."""
    if cfg is None:
        return []
    return [_build(runner, each) for each in (cfg if isinstance(cfg, list | tuple) else [cfg])]


def _build(runner: Any, cfg: Any) -> Any:
    if not isinstance(cfg, Mapping):
        if not hasattr(cfg, "step"):
            message = f"a {type(cfg).__name__} is no schedule"
            raise ConfigError(Problem("param_scheduler", message, "Give a dict with its type."))
        return cfg
    options = dict(cfg)
    convert = options.pop("convert_to_iter_based", False)
    loop = runner.phases.loop("train")
    by_epoch = options.get("by_epoch", True)
    options.setdefault("end", loop.max_epochs if by_epoch else loop.max_iters)
    kind = options.get("type", "")
    found = PARAM_SCHEDULERS.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(found, type) and issubclass(found, ParamScheduler)):
        message = f"{kind!r} is none of the schedules that know how to go on from a checkpoint"
        raise ConfigError(Problem("param_scheduler.type", message, f"Write one of {', '.join(PARAM_SCHEDULERS)}."))
    if not convert:
        return PARAM_SCHEDULERS.build({**options, "type": found}, default_args={"optimizer": runner.optim_wrapper})
    options.pop("type")
    length = len(loop.dataloader)
    return found.build_iter_from_epoch(runner.optim_wrapper, epoch_length=length, **options)


def scale_rates(runner: Any, wrapper: Any, cfg: Mapping[str, Any]) -> None:
    """Scale learning rates by the batch of all ranks, over the one for which they were chosen."""
    unknown = [key for key in cfg if key not in ("base_batch_size", "enable")]
    if unknown:
        remedy = "The keys are base_batch_size and enable."
        raise ConfigError(Problem(f"auto_scale_lr.{unknown[0]}", "there is no such key", remedy))
    if not cfg.get("enable", False):
        return
    if "base_batch_size" not in cfg:
        remedy = "Write the batch of all ranks for which the rate was chosen."
        raise ConfigError(Problem("auto_scale_lr.base_batch_size", "there is none", remedy))
    ratio = runner.batch_total / float(cfg["base_batch_size"])
    for group in wrapper.param_groups:
        group["lr"] = group["lr"] * ratio
    runner.logger.info(f"learning rates are scaled by {ratio:g}: a batch has {runner.batch_total} samples")
