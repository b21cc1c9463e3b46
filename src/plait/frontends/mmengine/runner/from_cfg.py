"""From a configuration to a runner's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.config import Config
from plait.frontends.mmengine.runner.core import BaseRunner
from plait.frontends.mmengine.runner.describe import known_arguments, misspelt

_OF_CFG = ("model_wrapper_cfg", "sync_bn", "activation_checkpointing", "efficient_conv_bn_eval", "compile")
_OF_FILES = ("custom_imports", "runner_type", "env_cfg")


def arguments_of(cfg: Config | Mapping[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys that are arguments; others are variables of a file, unless they look like a misspelt argument."""
    known = known_arguments(BaseRunner)
    problems = misspelt(cfg.keys(), (*known, *_OF_CFG, *_OF_FILES))
    if problems:
        raise ConfigError(problems)
    if "model" not in cfg.keys():  # noqa: SIM118  # a Config is no mapping
        raise ConfigError(Problem("model", "there is none", "Write model=dict(type=…)."))
    config = cfg if isinstance(cfg, Config) else Config(cfg)
    taken = {key: config.get(key) for key in known if key in config.keys() and key not in without}  # noqa: SIM118
    return {**taken, "cfg": config}
