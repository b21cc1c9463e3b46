"""`deepspeed.runtime.lr_schedules`: DeepSpeed's learning-rate schedules, stepped after each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from plait.config import ScheduleConfig, parse_sections
from plait.errors import ConfigError, Problem
from plait.optim import Schedule, build_schedule

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Scheduler",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

VALID_LR_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class Scheduler:
    """Sets the learning rate of each group for the next update, to the same value as DeepSpeed.

    `last_batch_iteration` counts updates, from -1 before the first.
    """

    def __init__(self, optimizer: Optimizer, configs: Sequence[ScheduleConfig], last_batch_iteration: int = -1) -> None:
        """`configs` has one schedule per group."""
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._schedules: list[Schedule] = [
            build_schedule(config, base_lr=float(rate), total_steps=None, steps_per_epoch=None)
            for config, rate in zip(configs, rates, strict=True)
        ]
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count an update, or set the count to `last_batch_iteration`; set the learning rates of the next update."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group in the next update."""
        return [schedule.lr(self.last_batch_iteration + 1) for schedule in self._schedules]

    def get_last_lr(self) -> list[float]:
        """Return what `get_lr` returns: these rates are set in the optimizer already."""
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Restore the number of updates, and set the learning rates that follow from it."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        for group, schedule, rate in zip(self.optimizer.param_groups, self._schedules, self.get_lr(), strict=True):
            group["lr"] = rate
            momentum = schedule.momentum(self.last_batch_iteration + 1)
            if momentum is None:
                continue
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif group.get("momentum"):
                group["momentum"] = momentum
            else:
                optimizer = type(self.optimizer).__name__
                message = f"{optimizer} has no momentum here that could be cycled"
                raise ConfigError(Problem("cycle_momentum", message, "Write false."))


_NOT_OPTIONS = {"self", "__class__", "optimizer", "last_batch_iteration"}


def _configs(schedule: str, arguments: Mapping[str, Any]) -> list[ScheduleConfig]:
    """Return one schedule configuration per group, from a constructor's arguments; lists have a value per group."""
    optimizer: Optimizer = arguments["optimizer"]
    options = {name: value for name, value in arguments.items() if name not in _NOT_OPTIONS}
    count = len(optimizer.param_groups)
    lists = {name: value for name, value in options.items() if isinstance(value, (list, tuple))}
    for name, value in lists.items():
        if len(value) != count:
            message = f"{len(value)} values, but the optimizer has {count} groups"
            raise ConfigError(Problem(name, message, "Give one, or one for each group."))
    configs = []
    for index in range(count):
        of_group = {name: value[index] for name, value in lists.items()}
        parsed = parse_sections(schedule={"type": schedule, **options, **of_group}).config
        assert parsed.schedule is not None
        configs.append(parsed.schedule)
    return configs


Rates = float | Sequence[float]


class WarmupLR(Scheduler):
    """Rises to `warmup_max_lr` (default: each group's own rate), then stays constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _configs("WarmupLR", locals()), last_batch_iteration)


class WarmupDecayLR(Scheduler):
    """Rises to `warmup_max_lr`, then decays linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _configs("WarmupDecayLR", locals()), last_batch_iteration)


class WarmupCosineLR(Scheduler):
    """Factors of each group's own rate: rises from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _configs("WarmupCosineLR", locals()), last_batch_iteration)


class OneCycle(Scheduler):
    """Rises to `cycle_max_lr`, falls back, then decays; with `cycle_momentum`, momentum changes the other way."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _configs("OneCycle", locals()), last_batch_iteration)


class LRRangeTest(Scheduler):
    """A learning rate that grows steadily, to find the one at which training diverges."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _configs("LRRangeTest", locals()), last_batch_iteration)
