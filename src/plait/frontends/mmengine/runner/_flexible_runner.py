"""`FlexibleRunner`: the same with any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.frontends.mmengine.config import Config
from plait.frontends.mmengine.registry import RUNNERS
from plait.frontends.mmengine.runner.runner import BaseRunner, arguments_of


@RUNNERS.register_module()
class FlexibleRunner(BaseRunner):
    """MMEngine's FlexibleRunner: `strategy` says how training is spread, `compile` whether it is compiled."""

    @classmethod
    def from_cfg(cls, cfg: Config | Mapping[str, Any]) -> FlexibleRunner:
        """A runner from a configuration, whose keys are the arguments."""
        return cls(**arguments_of(cfg))
