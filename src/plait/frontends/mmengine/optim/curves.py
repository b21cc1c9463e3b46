"""The schedules that go one way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim.scheduler import ParamScheduler


class ConstantParamScheduler(ParamScheduler):
    """`factor` times the value from `begin` to `end`."""

    def __init__(self, optimizer: Any, param_name: str, factor: float = 1.0 / 3, **kwargs: Any) -> None:
        self.factor = share("ConstantLR.factor", factor)
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.factor
        return value / self.factor if self.last_step == self._length else value


class LinearParamScheduler(ParamScheduler):
    """From `start_factor` to `end_factor` times the value."""

    def __init__(
        self, optimizer: Any, param_name: str, start_factor: float = 1.0 / 3, end_factor: float = 1.0, **kwargs: Any
    ) -> None:
        self.start_factor = share("LinearLR.start_factor", start_factor)
        self.end_factor = share("LinearLR.end_factor", end_factor)
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.start_factor
        change = self.end_factor - self.start_factor
        return value * (1.0 + change / (self._length * self.start_factor + (self.last_step - 1) * change))


class ExponentialParamScheduler(ParamScheduler):
    """`gamma` times the value, at every step."""

    def __init__(self, optimizer: Any, param_name: str, gamma: float, **kwargs: Any) -> None:
        self.gamma = gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return value if self.last_step == 0 else value * self.gamma


class StepParamScheduler(ParamScheduler):
    """`gamma` times the value, every `step_size` steps."""

    counts = ("begin", "end", "step_size")

    def __init__(self, optimizer: Any, param_name: str, step_size: int, gamma: float = 0.1, **kwargs: Any) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return value * self.gamma if self.last_step and self.last_step % self.step_size == 0 else value


class MultiStepParamScheduler(ParamScheduler):
    """`gamma` times the value, at each milestone."""

    counts = ("begin", "end", "milestones")

    def __init__(
        self, optimizer: Any, param_name: str, milestones: Sequence[int], gamma: float = 0.1, **kwargs: Any
    ) -> None:
        self.milestones, self.gamma = Counter(milestones), gamma
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        return float(value * self.gamma ** self.milestones[self.last_step])


class PolyParamScheduler(ParamScheduler):
    """A polynomial from the value down to `eta_min`."""

    def __init__(
        self, optimizer: Any, param_name: str, eta_min: float = 0.0, power: float = 1.0, **kwargs: Any
    ) -> None:
        self.eta_min, self.power = eta_min, power
        super().__init__(optimizer, param_name, **kwargs)

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        if self.last_step == 0:
            return value
        left = 1.0 - 1.0 / (self._length - self.last_step + 1)
        return float((value - self.eta_min) * left**self.power + self.eta_min)


class CosineAnnealingParamScheduler(ParamScheduler):
    """Half a cosine from the value down to `eta_min`, in `T_max` steps: without it, in `end - begin`."""

    counts = ("begin", "end", "T_max")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        T_max: int | None = None,  # noqa: N803  # its name everywhere
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.eta_min, self.eta_min_ratio = lowest(eta_min, eta_min_ratio)
        self.T_max = T_max or 0
        super().__init__(optimizer, param_name, **kwargs)

    def _start(self) -> None:
        self.T_max = self.T_max or self.end - self.begin

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        low = self.eta_min if self.eta_min_ratio is None else base * self.eta_min_ratio
        step, total = self.last_step, self.T_max
        if step == 0:
            return value
        if (step - 1 - total) % (2 * total) == 0:  # the turn at the bottom, where the ratio has no value
            return value + (base - low) * (1 - math.cos(math.pi / total)) / 2
        ratio = (1 + math.cos(math.pi * step / total)) / (1 + math.cos(math.pi * (step - 1) / total))
        return ratio * (value - low) + low


def share(key: str, value: float) -> float:
    """A number from 0 to 1; anything else is an error, as it is in MMEngine."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(Problem(f"param_scheduler.{key}", f"{value!r}", "Write a number from 0 to 1."))
    return value


def lowest(eta_min: float | None, ratio: float | None) -> tuple[float, float | None]:
    """Where a cosine ends: a value, or a share of the first one."""
    if eta_min is not None and ratio is not None:
        message = "and `eta_min_ratio` are both given"
        raise ConfigError(Problem("param_scheduler.eta_min", message, "Leave one of them out."))
    return eta_min or 0.0, ratio
