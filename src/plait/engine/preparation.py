"""The input of every engine's `prepare`: a frozen record with the model, the run description and the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait.config import RunConfig
from plait.distributed import World
from plait.engine.forward import LogFunction
from plait.engine.loss import LossFunction
from plait.errors import ConfigError, Problem
from plait.optim import OptimizerSource, Schedule, build_schedule
from plait.precision import Policy, make_policy

ModelSource = nn.Module | Callable[[], nn.Module] | None
"""A module, a function that builds one, or None if `config.model` describes it."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of the run; None for what is not known."""

    total_steps: int | None = None
    steps_per_epoch: int | None = None

    def schedule(self, config: RunConfig, base_lr: float | None = None, optimizer: Optimizer | None = None) -> Schedule:
        """Return the run's schedule over this length; `base_lr` replaces `optim.lr`."""
        base_lr = config.optim.lr if base_lr is None else base_lr
        if base_lr is None:
            message = f"strategy.engine: {config.strategy.engine} needs the learning rate"
            raise ConfigError(Problem("optim.lr", message, "Write it."))
        return build_schedule(
            config.schedule,
            base_lr=base_lr,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            optimizer=optimizer,
        )


@dataclass(frozen=True, slots=True)
class Preparation:
    """A model to prepare for training, and everything that engines need for it."""

    config: RunConfig
    world: World
    _: KW_ONLY
    model: ModelSource = None
    """A module, a function that builds one, or None if `config.model` describes it."""
    optimizer: OptimizerSource | None = None
    """The user's own optimizer over the parameters of that module; None: the one that `config.optim` describes."""
    loss_function: LossFunction | None = None
    length: RunLength = RunLength()
    accumulation: int = 1
    """Micro-batches per step."""
    example: Any = None
    """The inputs of one micro-batch; only `recompute: auto` and `pipeline.split: time` need it."""
    log: LogFunction = print

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    @property
    def policy(self) -> Policy:
        """The dtypes of the run: for computing, for reducing gradients, and whether there are master weights."""
        return make_policy(self.config.precision)

    @property
    def sharded(self) -> bool:
        """Whether parameters will be sharded with `fully_shard`."""
        strategy, layout = self.config.strategy, self.world.layout
        shards = layout.dp_shard * layout.ep * layout.cp
        return strategy.stage > 0 and (shards > 1 or strategy.offload.params != "none")

    def schedule(self) -> Schedule:
        """Return the learning-rate schedule over the run's length."""
        return self.length.schedule(self.config)
