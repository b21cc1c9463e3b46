"""`Runner`: one process, or a copy of the model on each of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.config import Config, as_config
from plait.frontends.mmengine.registry import RUNNERS
from plait.frontends.mmengine.runner.core import BaseRunner, known_arguments, misspelt

# From a configuration to a runner's arguments.


_OF_CFG = ("model_wrapper_cfg", "sync_bn", "activation_checkpointing", "efficient_conv_bn_eval", "compile")
_OF_FILES = ("custom_imports", "runner_type", "env_cfg")


def arguments_of(cfg: Config | Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are arguments; others are variables of a file, unless they look like a misspelt argument."""
    config = as_config(cfg)
    known = known_arguments(BaseRunner)
    problems = misspelt(config.keys(), (*known, *_OF_CFG, *_OF_FILES))
    if problems:
        raise ConfigError(problems)
    if "model" not in config:
        raise ConfigError(Problem("model", "there is none", "Write model=dict(type=…)."))
    taken = {key: config.get(key) for key in known if key in config}
    return {**taken, "cfg": config}


@RUNNERS.register_module()
class Runner(BaseRunner):
    """MMEngine's Runner. `cfg` may hold `compile`, `model_wrapper_cfg` and `sync_bn`, as there."""

    def __init__(
        self, model: Any, work_dir: str | Path, train_dataloader: Any = None, *, launcher: str = "none", **options: Any
    ) -> None:
        cfg = as_config(options.get("cfg") or {})
        if "strategy" in options:
            message = "Runner has none"
            raise ConfigError(Problem("strategy", message, "Use FlexibleRunner, which has the same arguments."))
        options.setdefault("compile", cfg.get("compile", False))
        options["strategy"] = _strategy(cfg)
        super().__init__(model, work_dir=work_dir, train_dataloader=train_dataloader, launcher=launcher, **options)

    @classmethod
    def from_cfg(cls, cfg: Config | Mapping[str, Any]) -> Runner:
        """A runner from a configuration, whose keys are the arguments."""
        return cls(**arguments_of(cfg))


def _strategy(cfg: Config) -> dict[str, Any]:
    wrapper = dict(cfg.get("model_wrapper_cfg") or {})
    for key in ("activation_checkpointing", "efficient_conv_bn_eval"):
        if cfg.get(key):
            message = f"{cfg.get(key)!r}: modules named one by one are not rewritten here"
            remedy = "FlexibleRunner with FSDPStrategy(activation_checkpointing=dict()) recomputes whole blocks."
            raise ConfigError(Problem(f"cfg.{key}", message, remedy))
    sharded = "Sharded" in str(getattr(wrapper.get("type"), "__name__", wrapper.get("type", "")))
    return {
        "type": "FSDPStrategy" if sharded else "DDPStrategy",
        "model_wrapper": wrapper,
        "sync_bn": cfg.get("sync_bn"),
    }
