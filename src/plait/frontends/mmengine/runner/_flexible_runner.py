"""`FlexibleRunner`: a runner with an argument for the parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.frontends.mmengine.config import Config
from plait.frontends.mmengine.registry import RUNNERS
from plait.frontends.mmengine.runner.runner import BaseRunner, arguments_of


@RUNNERS.register_module()
class FlexibleRunner(BaseRunner):
    """MMEngine's FlexibleRunner. `strategy`: the parallel strategy. `compile`: whether to use torch.compile."""

    @classmethod
    def from_cfg(cls, cfg: Config | Mapping[str, Any]) -> FlexibleRunner:
        """Return a runner whose arguments are the keys of a configuration."""
        return cls(**arguments_of(cfg))
