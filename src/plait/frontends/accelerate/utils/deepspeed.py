"""`accelerate.utils.deepspeed`: stand-ins for the optimizer and scheduler of a DeepSpeed configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed import Parameters, Recipe


class DummyOptim:
    """The parameters of the optimizer that the DeepSpeed configuration describes; `prepare` builds it.

    `lr` and `weight_decay` are used where the configuration has `"auto"`.
    """

    def __init__(self, params: Parameters, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params: list[Any] = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def parameters(self) -> list[Any]:
        """All parameters, without their groups."""
        groups = (group["params"] if isinstance(group, Mapping) else [group] for group in self.params)
        return [param for group in groups for param in group]


class DummyScheduler:
    """The schedule of the DeepSpeed configuration, or the one that `lr_scheduler_callable` builds."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def make_optimizer(recipe: Recipe, dummy: DummyOptim, model: nn.Module) -> Optimizer:
    """Return the optimizer of the DeepSpeed configuration, over parameters of `model`."""
    if not recipe.has_optimizer:
        raise _missing("DummyOptim", "optimizer", "Pass a torch.optim optimizer.")
    auto = {"optimizer.params.lr": dummy.lr, "optimizer.params.weight_decay": dummy.weight_decay}
    return recipe.optimizer(model, dummy.params, auto)


def make_scheduler(recipe: Recipe, dummy: DummyScheduler, optimizer: Optimizer, *, ranks: int) -> Any:
    """Return the scheduler of the DeepSpeed configuration.

    `total_num_steps` is the number of batches of the original loader; each step reads `ranks` of them.
    """
    if dummy.lr_scheduler_callable is not None:
        return dummy.lr_scheduler_callable(optimizer)
    if not recipe.has_schedule:
        raise _missing("DummyScheduler", "scheduler", "Pass an lr_scheduler_callable, or a torch scheduler.")
    auto: dict[str, Any] = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": optimizer.defaults["lr"],
        "scheduler.params.warmup_num_steps": max(1, dummy.warmup_num_steps),
    }
    if dummy.total_num_steps is not None:
        auto["scheduler.params.total_num_steps"] = math.ceil(dummy.total_num_steps / ranks)
    return recipe.schedule(optimizer, auto)


def refuse_duplicate(recipe: Recipe, section: str) -> None:
    """Raise if the DeepSpeed configuration describes what the script has built itself."""
    if section in recipe.sections:
        stand_in = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[section]
        message = "is in the configuration, but the script has built its own"
        remedy = f"Leave it out, or use a {stand_in} of plait.frontends.accelerate.utils instead."
        raise ConfigError(Problem(f"deepspeed_config: {section}", message, remedy))


def _missing(name: str, section: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"deepspeed_config: {section}", f"a {name} needs it, and it is not set", remedy))
