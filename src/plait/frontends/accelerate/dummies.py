"""Stand-ins for an optimizer and a scheduler that a DeepSpeed configuration describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed import Parameters, Recipe


class DummyOptim:
    """Says which parameters the optimizer of the DeepSpeed configuration gets; `prepare` makes it.

    `lr` and `weight_decay` fill what the configuration leaves open with `"auto"`.
    """

    def __init__(self, params: Parameters, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params: list[Any] = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def parameters(self) -> list[Any]:
        """All of them, without their groups."""
        groups = (each["params"] if isinstance(each, Mapping) else [each] for each in self.params)
        return [param for group in groups for param in group]


class DummyScheduler:
    """Stands for the schedule of the DeepSpeed configuration, or for what `lr_scheduler_callable` makes."""

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
    """The optimizer that a stand-in stands for, over parameters of `model`."""
    if not recipe.has_optimizer:
        raise _missing("DummyOptim", "optimizer", "Make a torch.optim optimizer.")
    auto = {"optimizer.params.lr": dummy.lr, "optimizer.params.weight_decay": dummy.weight_decay}
    return recipe.optimizer(model, dummy.params, auto)


def make_scheduler(recipe: Recipe, dummy: DummyScheduler, optimizer: Optimizer, *, ranks: int) -> Any:
    """The scheduler that a stand-in stands for; `total_num_steps` counts the batches of `ranks` ranks."""
    if dummy.lr_scheduler_callable is not None:
        return dummy.lr_scheduler_callable(optimizer)
    if not recipe.has_schedule:
        raise _missing("DummyScheduler", "scheduler", "Give it an lr_scheduler_callable, or make a torch scheduler.")
    auto: dict[str, Any] = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": optimizer.defaults["lr"],
        "scheduler.params.warmup_num_steps": max(1, dummy.warmup_num_steps),
    }
    if dummy.total_num_steps is not None:
        auto["scheduler.params.total_num_steps"] = math.ceil(dummy.total_num_steps / ranks)
    return recipe.schedule(optimizer, auto)


def refuse_two(recipe: Recipe, word: str) -> None:
    """A script that makes its own beside a configuration that describes one."""
    if word in recipe.sections:
        stand_in = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[word]
        message = "the configuration describes one, and the script has made its own"
        remedy = f"Leave it out, or make a {stand_in} of plait.frontends.accelerate.utils instead."
        raise ConfigError(Problem(f"deepspeed_config: {word}", message, remedy))


def _missing(name: str, word: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"deepspeed_config: {word}", f"a {name} stands for it, and there is none", remedy))
