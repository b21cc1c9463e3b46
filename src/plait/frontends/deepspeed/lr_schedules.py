"""`deepspeed.runtime.lr_schedules`: its schedules as objects that are stepped after each update."""

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
    """Sets each group's rate for the coming update. `last_batch_iteration` counts updates, from -1 before the first.

    The rates are those of a DeepSpeed run: see `plait.frontends.deepspeed.schedules`.
    """

    def __init__(self, optimizer: Optimizer, configs: Sequence[ScheduleConfig], last_batch_iteration: int = -1) -> None:
        """`configs`: one a group."""
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._schedules: list[Schedule] = [
            build_schedule(config, base_lr=float(rate), total_steps=None, steps_per_epoch=None)
            for config, rate in zip(configs, rates, strict=True)
        ]
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """An update is done: set the rates of the next."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """The rate of each group in the coming update."""
        return [schedule.lr(self.last_batch_iteration + 1) for schedule in self._schedules]

    def get_last_lr(self) -> list[float]:
        """The same: rates are set when they are computed."""
        return self.get_lr()

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Go on from there, with the rates that belong to it."""
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
                kind = type(self.optimizer).__name__
                message = f"{kind} runs without momentum here, so there is none to cycle"
                raise ConfigError(Problem("cycle_momentum", message, "Write false."))


def _for_each(optimizer: Optimizer, kind: str, options: Mapping[str, Any]) -> list[ScheduleConfig]:
    """One configuration for each group; an option that is a list has one value for each."""
    count = len(optimizer.param_groups)
    lists = {name: value for name, value in options.items() if isinstance(value, (list, tuple))}
    for name, value in lists.items():
        if len(value) != count:
            message = f"{len(value)} values, but the optimizer has {count} groups"
            raise ConfigError(Problem(name, message, "Give one, or one for each group."))
    configs = []
    for index in range(count):
        own = {name: value[index] for name, value in lists.items()}
        parsed = parse_sections(schedule={"type": kind, **options, **own}).config
        assert parsed.schedule is not None
        configs.append(parsed.schedule)
    return configs


Rates = float | Sequence[float]


class WarmupLR(Scheduler):
    """Up to `warmup_max_lr`, or each group's own rate, then flat."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        options = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, _for_each(optimizer, "WarmupLR", options), last_batch_iteration)


class WarmupDecayLR(Scheduler):
    """Up to `warmup_max_lr`, then in a straight line down to `warmup_min_lr` at `total_num_steps`."""

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
        options = {
            "total_num_steps": total_num_steps,
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, _for_each(optimizer, "WarmupDecayLR", options), last_batch_iteration)


class WarmupCosineLR(Scheduler):
    """Up from a ratio of each group's own rate to the whole, then half a cosine down to `cos_min_ratio`."""

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
        options = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, _for_each(optimizer, "WarmupCosineLR", options), last_batch_iteration)


class OneCycle(Scheduler):
    """Up to `cycle_max_lr` and back, with momentum the other way round if asked, then decay."""

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
        options = {
            "cycle_min_lr": cycle_min_lr,
            "cycle_max_lr": cycle_max_lr,
            "decay_lr_rate": decay_lr_rate,
            "cycle_first_step_size": cycle_first_step_size,
            "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count,
            "cycle_second_stair_count": cycle_second_stair_count,
            "decay_step_size": decay_step_size,
            "cycle_momentum": cycle_momentum,
            "cycle_min_mom": cycle_min_mom,
            "cycle_max_mom": cycle_max_mom,
            "decay_mom_rate": decay_mom_rate,
        }
        super().__init__(optimizer, _for_each(optimizer, "OneCycle", options), last_batch_iteration)


class LRRangeTest(Scheduler):
    """A rate that climbs, to find where training breaks."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        options = {
            "lr_range_test_min_lr": lr_range_test_min_lr,
            "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate,
            "lr_range_test_staircase": lr_range_test_staircase,
        }
        super().__init__(optimizer, _for_each(optimizer, "LRRangeTest", options), last_batch_iteration)
