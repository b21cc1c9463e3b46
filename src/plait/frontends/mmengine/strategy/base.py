"""Strategies: each translates its options into sections of a run description, with an account."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends import Translation
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy.table import Row, Sheet, honoured, refused, unneeded


class BaseStrategy(ABC):
    """Options of one way to spread training."""

    default_wrapper = "OptimWrapper"
    """The type of an optim wrapper that names none."""
    own_wrapper = False
    """Whether only that type goes with it."""
    skip_init_weights = False
    sync_bn: str | None = None

    def __init__(self, *, auto_scale_lr: Mapping[str, Any] | None = None) -> None:
        """`auto_scale_lr` as of the runner."""
        self.auto_scale_lr = auto_scale_lr

    @abstractmethod
    def translate(self, world_size: int) -> Translation:
        """The sections that these options ask for, and what became of each of them."""


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy):
    """One process."""

    def translate(self, world_size: int) -> Translation:
        """One copy, on one rank."""
        sheet = Sheet()
        sheet.put("strategy.layout", {"dp_replicate": 1, "dp_shard": 1})
        return Translation(sheet.sections, sheet.account)


_WHOLE = "gradients are collected in buckets that are reduced in one order on all ranks, whatever takes part"
_WRAPPER: dict[str, Row] = {
    "type": unneeded("the model is not wrapped: its gradients are collected from outside"),
    "bucket_cap_mb": honoured("strategy.bucket_mb", float),
    "find_unused_parameters": unneeded(_WHOLE),
    "static_graph": unneeded(_WHOLE),
    "gradient_as_bucket_view": unneeded("it always is one, where formats allow it"),
    "broadcast_buffers": unneeded("buffers are averaged before each validation and each checkpoint"),
    "exclude_norm_params": unneeded("which parameters share a bucket does not change the sums"),
    "dim": unneeded("a rank has one device"),
    "device_ids": unneeded("a rank has one device"),
    "output_device": unneeded("a rank has one device"),
    "process_group": refused("the groups follow from strategy.layout: leave it out"),
    "detect_anomalous_params": refused("a parameter without a gradient is no error here: leave it out", False),
}


@STRATEGIES.register_module()
class DDPStrategy(BaseStrategy):
    """A whole copy on every rank; gradients are averaged."""

    def __init__(
        self, *, model_wrapper: Mapping[str, Any] | None = None, sync_bn: str | None = None, **kwargs: Any
    ) -> None:
        """`sync_bn='torch'` turns batch norms into ones that see the batch of all ranks; needs CUDA."""
        super().__init__(**kwargs)
        if sync_bn not in (None, "torch"):
            message = f"{sync_bn!r} is not offered"
            raise ConfigError(Problem("strategy.sync_bn", message, "Write 'torch': the same, by torch itself."))
        self.sync_bn = sync_bn
        self._wrapper = dict(model_wrapper or {})

    def translate(self, world_size: int) -> Translation:
        """Stage 0."""
        sheet = Sheet()
        sheet.put("strategy.zero", 0)
        sheet.walk("strategy.model_wrapper", self._wrapper, _WRAPPER)
        return Translation(sheet.sections, sheet.account)
