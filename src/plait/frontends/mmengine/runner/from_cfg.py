"""From a configuration to a runner's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.config import Config
from plait.frontends.mmengine.config.config import as_config
from plait.frontends.mmengine.runner.core import BaseRunner
from plait.frontends.mmengine.runner.describe import known_arguments, misspelt

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
